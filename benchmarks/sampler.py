"""The sampler: what a support costs, rival samplers, edits, and the time over one read of the logits.

python benchmarks/sampler.py [--vocab 151936] [--rows 1 8 64] [--rounds 9] [--rows-like both] [--only a b c d]

a: with the support against without it, where XLA drops everything that only the support needs.
b: the rivals of `rivals.py`, which return a token and no support, against ours with support.
c: every edit on every row, with a history, against none.
d: ours against the maximum of each row.
"""

import argparse
import os
import statistics
import warnings
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import rivals
from timing import in_turn

from jaxmask import History, SamplingBatch, SamplingParams, sample

TOP_K, TOP_P, WIDTH = 50, 0.95, 64
SETTINGS = {f"top-k {TOP_K}, top-p {TOP_P}": TOP_K, f"top-p {TOP_P}": None}
# The prompt and output lengths of part c.
PROMPT, OUTPUT = 200, 100
# Time for further rounds where runs are short; part a resolves a few per cent and needs many.
SECONDS = {"a": 3.0, "b": 1.0, "c": 1.0, "d": 1.0}


@jax.jit
def with_support(logits, batch, history=None):
    return sample(logits, batch, step=OUTPUT, history=history, width=WIDTH)


@jax.jit
def without_support(logits, batch):
    drawn = sample(logits, batch, step=OUTPUT, width=WIDTH)
    return drawn.token_ids, drawn.logprobs


@jax.jit
def one_read(logits):
    return logits.max(axis=1)


def flat_rows(rng: np.random.Generator, num_rows: int, vocab: int) -> np.ndarray:
    """Normal with deviation 3: nuclei of about 13,000 ids in a vocabulary of 151,936."""
    return (3 * rng.normal(size=(num_rows, vocab))).astype(np.float32)


def peaked_rows(rng: np.random.Generator, num_rows: int, vocab: int) -> np.ndarray:
    """Like the rows of a language model: a few hundred ids of geometric shares over a floor of normal logits.

    The steepness varies from row to row so widely that half of the nuclei hold one or two ids, and a few a hundred.
    """
    rows = 1.5 * rng.normal(size=(num_rows, vocab))
    num_head = min(256, vocab // 2)
    # Evenly spread over the quantiles: the mean size hangs on the few flattest rows, which chance would move.
    normal = [statistics.NormalDist().inv_cdf((index + 0.5) / num_rows) for index in range(num_rows)]
    for row, deviate in zip(rows, rng.permutation(normal), strict=True):
        head = -2 * np.exp(1.9 * deviate) * np.arange(num_head)
        # The floor keeps between exp(-4) and exp(-8) of the mass.
        lead = rng.uniform(4, 8) + np.log(np.exp(row).sum()) - np.log(np.exp(head).sum())
        row[rng.choice(vocab, num_head, replace=False)] = head + lead
    return rows.astype(np.float32)


KINDS: dict[str, Callable[..., np.ndarray]] = {"flat": flat_rows, "peaked": peaked_rows}


def shares(row: np.ndarray, top_k: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Ids by falling logit, at most top_k of them, and the probability before each in float64."""
    order = np.argsort(-row)
    weights = np.exp(row[order].astype(np.float64) - row[order[0]])[:top_k]
    return order[:top_k], (np.cumsum(weights) - weights) / weights.sum()


def check(logits: np.ndarray, top_k: int | None, draws: dict[str, Callable[[], object]]) -> None:
    """Raises where a sampler drew an id outside the support, or ours counted another support."""
    tokens = {name: np.asarray(draw()) for name, draw in draws.items() if name != "ours"}
    drawn = draws["ours"]()
    tokens["ours"] = np.asarray(drawn.token_ids)
    counts = np.asarray(drawn.support.counts)
    for index, row in enumerate(logits):
        order, before = shares(row, top_k)
        # Running sums in float32 over a vocabulary are off by some 1e-5: that much may move the last ids.
        low, high = (before < TOP_P - 1e-4).sum(), (before < TOP_P + 1e-4).sum()
        if not low <= counts[index] <= high:
            raise AssertionError(f"row {index}: {counts[index]} ids in our support, not {low} to {high}.")
        for name, ids in tokens.items():
            # Tunix measures top-p against the whole vocabulary: after top-k it may keep more of the k.
            limit = len(order) if name == "tunix" and top_k is not None else high
            if ids[index] not in order[:limit]:
                raise AssertionError(f"{name} drew id {ids[index]} outside the support of row {index}.")


def edited_requests(logits: np.ndarray, top_k: int | None, rng: np.random.Generator) -> Iterator[SamplingParams]:
    """One request per row with every edit on; the head of each row stays allowed, so nuclei keep their shape."""
    vocab = logits.shape[1]
    for row in logits:
        head = np.argpartition(-row, min(256, vocab - 1))[:256]
        others = rng.choice(vocab, (4, min(1024, vocab // 4))).astype(int).tolist()
        yield SamplingParams(
            top_k=top_k or 0,
            top_p=TOP_P,
            seed=0,
            max_tokens=4 * OUTPUT,
            min_tokens=2 * OUTPUT,
            stop_token_ids=others[0][:4],
            allowed_token_ids=sorted({*head.tolist(), *others[1]}),
            logit_bias=dict.fromkeys(others[2][:64], 0.5),
            bad_words=[others[3][4 * word : 4 * word + 3] for word in range(8)],
            repetition_penalty=1.1,
            frequency_penalty=0.1,
            presence_penalty=0.1,
        )


def edited(logits: np.ndarray, top_k: int | None) -> tuple[SamplingBatch, History]:
    """Rows with every edit on; each output repeats the 16 leading ids of its row, as texts do."""
    rng = np.random.default_rng(1)
    num_rows, vocab = logits.shape
    batch = SamplingBatch.from_params(list(edited_requests(logits, top_k, rng)), vocab_size=vocab, support_bound=top_k)
    prompts = rng.integers(vocab, size=(num_rows, PROMPT))
    outputs = rng.integers(vocab, size=(num_rows, OUTPUT))
    outputs[:, :16] = np.argpartition(-logits, 16, axis=1)[:, :16]
    return batch, History.from_lists(prompts.tolist(), outputs.tolist(), batch)


def measure(logits: np.ndarray, top_k: int | None, parts: list[str], rounds: int) -> dict[str, str]:
    """One row of the table: a cell per column, for the parts asked for."""
    on_device = jnp.asarray(logits)
    params = SamplingParams(top_k=top_k or 0, top_p=TOP_P, seed=0)
    batch = SamplingBatch.from_params([params] * len(logits), vocab_size=logits.shape[1], support_bound=top_k)
    ours = {"ours": lambda: with_support(on_device, batch)}
    others = rivals.prepared(on_device, top_k, TOP_P)
    check(logits, top_k, ours | others)
    cells = {}

    def compare(part: str, against: dict[str, Callable[[], object]], is_over: bool) -> None:
        """Rival over ours for rivals, ours over the other where the other is a part of ours."""
        if part not in parts:
            return
        times = in_turn(ours | against, rounds, SECONDS[part])
        cells.setdefault("ours, ms", f"{times['ours']:.2f}")
        for name in against:
            ratio = times["ours"] / times[name] if is_over else times[name] / times["ours"]
            cells[f"{part}: {name}"] = f"{ratio:.2f}x ({times[name]:.2f})"

    compare("a", {"without support": lambda: without_support(on_device, batch)}, is_over=True)
    compare("b", others, is_over=False)
    if "c" in parts:
        edited_batch, history = edited(logits, top_k)
        compare("c", {"every edit": lambda: with_support(on_device, edited_batch, history)}, is_over=False)
    compare("d", {"one read": lambda: one_read(on_device)}, is_over=True)
    return cells


def print_table(rows: list[dict[str, str]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    print("\n| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for row in rows:
        print("| " + " | ".join(row.get(name, "") for name in columns) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=9, help="at least; short runs take more, slow rivals fewer")
    parser.add_argument("--rows-like", choices=[*KINDS, "both"], default="both")
    parser.add_argument("--only", nargs="+", choices=list("abcd"), default=list("abcd"), help="parts to measure")
    options = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    if rivals.torch is None:
        print("torch is not installed: its two rivals are left out")
    table = []
    for kind in KINDS if options.rows_like == "both" else [options.rows_like]:
        logits = KINDS[kind](np.random.default_rng(0), max(64, *options.rows), options.vocab)
        sizes = np.array([(shares(row, None)[1] < TOP_P).sum() for row in logits])
        print(
            f"{kind}: support sizes at top-p {TOP_P} over {len(sizes)} rows: mean {sizes.mean():.1f}, "
            f"median {np.median(sizes):.0f}, 99 % at most {np.quantile(sizes, 0.99):.0f}",
            flush=True,
        )
        for setting, top_k in SETTINGS.items():
            for num_rows in options.rows:
                cells = measure(logits[:num_rows], top_k, options.only, options.rounds)
                table.append({"rows like": kind, "setting": setting, "B": str(num_rows)} | cells)
    print_table(table)
    torch_version = "absent" if rivals.torch is None else rivals.torch.__version__
    print(
        f"\na, d: ours / other; b, c: other / ours; other's ms in brackets. V = {options.vocab}, float32, W = {WIDTH}."
    )
    print(f"{os.cpu_count()} CPUs, jax {jax.__version__}, torch {torch_version}")


if __name__ == "__main__":
    main()
