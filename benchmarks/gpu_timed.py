"""What `gpu_kernels.py` compares and times: each operation with its kernels, in plain XLA, and as others do it.

A case is a set of programs that take the same arrays. Two of them, KERNEL and PLAIN, must agree.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gpu_rivals
import jax
import jax.numpy as jnp
import numpy as np
import rivals
from sampler import flat_rows, peaked_rows

from jaxmask import SamplingBatch, SamplingParams, Support, sample
from jaxmask.kernels.compact import compact_support
from jaxmask.kernels.head import gathered_head

KERNEL, PLAIN = "kernel", "plain XLA"
TOP_K, TOP_P = 50, 0.95
# A burst goes round copies of its input, as many as this takes, so that none is found in the cache (50 MB on an H200).
COLD_BYTES, MOST_COPIES = 2**28, 16


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
      vocab: ids, V.
      rows: rows of the logits, in the order in which they are measured.
      half_rows: the same in bfloat16.
      flat_rows: the same for rows that are drawn one by one.
      width: cells of a compacted row.
      checked, adversarial: rows whose draws are compared, of the whole vocabulary (0: none) and of 5003 ids.
      tokens, depth: rows and columns of the hidden states.
      chunk: tokens that the dense rival takes at once.
      copied: float32 numbers of the copy that bandwidths are measured against.
      rounds: how often each rival takes its turn.
    """

    vocab: int
    rows: tuple[int, ...]
    half_rows: tuple[int, ...]
    flat_rows: tuple[int, ...]
    width: int
    checked: int
    adversarial: int
    tokens: int
    depth: int
    chunk: int
    copied: int
    rounds: int


FULL = Sizes(151_936, (256, 64, 8, 1), (256,), (64, 8), 1024, 256, 1024, 2048, 2048, 512, 2**28, 9)
SMOKE = Sizes(4099, (4,), (), (), 32, 0, 42, 32, 64, 16, 2**16, 1)


@dataclasses.dataclass(frozen=True)
class Case:
    """Programs to compare and to time.

    Attributes:
      name: of the operation and its shape.
      programs: functions of arrays, by the name of the rival.
      inputs: the arguments of all programs, several times.
      others: what is no JAX program, by name; functions of the same arguments.
      fewest_bytes: what any implementation moves: inputs read once and outputs written once.
      is_head: the head's scores and gradients; a sample or a support otherwise.
    """

    name: str
    programs: Mapping[str, Callable[..., Any]]
    inputs: Sequence[tuple[Any, ...]]
    others: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    fewest_bytes: int = 0
    is_head: bool = False


def adversarial_rows(rng: np.random.Generator, num_rows: int, vocab: int) -> np.ndarray:
    """Ties, NaN, infinities, nothing at all, one id, zeros of both signs, neighbouring floats, huge and usual rows."""
    usual = 4 * rng.normal(size=(num_rows, vocab))
    ties = rng.integers(-2, 3, (num_rows, vocab)).astype(float)
    is_some = rng.random((num_rows, vocab)) < 0.3
    one = np.where(np.arange(vocab) == rng.integers(vocab, size=(num_rows, 1)), 1.0, -np.inf)
    kinds = (
        usual,
        ties,
        np.where(is_some, np.nan, usual),
        np.where(is_some, np.inf, usual),
        np.where(is_some, -np.inf, ties),
        np.full_like(usual, -np.inf),
        np.full_like(usual, np.nan),
        one,
        np.full_like(usual, 3.0),
        np.where(is_some, -0.0, 0.0),
        3 + rng.integers(0, 4, (num_rows, vocab)) * 2.0**-22,
        np.where(is_some, 3e38, -3e38),
        np.linspace(5, -5, vocab)[None, :].repeat(num_rows, axis=0),
        -np.log(rng.permuted(np.arange(1.0, vocab + 1)[None, :].repeat(num_rows, axis=0), axis=1)),
    )
    return np.stack([kinds[row % len(kinds)][row] for row in range(num_rows)]).astype(np.float32)


def mixed_settings(rng: np.random.Generator, num_rows: int) -> list[SamplingParams]:
    """A combination of filters for each row."""
    return [
        SamplingParams(
            temperature=float(rng.choice([0.7, 1.0, 1.3])),
            top_k=int(rng.choice([0, 1, 5, 50, 64])),
            top_p=float(rng.choice([1.0, 0.999, 0.95, 0.5])),
            # No share of a row whose k-th token has 1 / k of the first one's mass: that would be decided by rounding.
            min_p=float(rng.choice([0.0, 0.0, 0.053])),
            seed=int(rng.integers(2**32)),
        )
        for _ in range(num_rows)
    ]


def compact_case(logits: jax.Array, width: int, kernel: str) -> Case:
    """Compaction with packed bits."""

    def run(implementation: str, logits: jax.Array) -> Support:
        return compact_support(logits, width, implementation=implementation)

    num_rows, vocab = logits.shape
    programs = {KERNEL: functools.partial(run, kernel), PLAIN: functools.partial(run, "xla")}
    programs["cumsum + scatter"] = functools.partial(gpu_rivals.scattered, width=width)
    written = num_rows * (4 * width + 4 + -(-vocab // 8))
    name = f"compact, W = {width}, {_shape(logits)}"
    return Case(name, programs, _copies(logits), fewest_bytes=logits.nbytes + written)


def sampling_case(
    name: str, logits: jax.Array, params: Sequence[SamplingParams], width: int, kernel: str, *, is_timed: bool = True
) -> Case:
    """A draw with supports; if timed, all rows have one setting, and the rivals draw without supports."""
    (num_rows, vocab), top_k = logits.shape, params[0].top_k or None
    bound = top_k if is_timed else None
    batch = SamplingBatch.from_params(list(params), vocab_size=vocab, support_bound=bound)

    def run(implementation: str, logits: jax.Array, batch: SamplingBatch) -> Any:
        with_logprobs = not is_timed
        return sample(
            logits, batch, step=0, width=width, return_support_logprobs=with_logprobs, implementation=implementation
        )

    programs = {KERNEL: functools.partial(run, kernel), PLAIN: functools.partial(run, "xla")}
    inputs = [(copy, batch) for (copy,) in (_copies(logits) if is_timed else [(logits,)])]
    others: dict[str, Callable[..., Any]] = {}
    if is_timed:
        key = jax.random.key(0)
        for name_of_rival, rival in (("tunix", rivals.tunix), ("skyrl", rivals.skyrl)):
            programs[name_of_rival] = functools.partial(_without_support, rival, key, top_k)
        others = gpu_rivals.torch_rivals(num_rows, top_k, TOP_P)
    # Token, log-probability, count, flag; cells and bits.
    written = num_rows * (13 + 4 * width + (0 if bound else -(-vocab // 8)))
    return Case(f"{name}, {_shape(logits)}", programs, inputs, others, logits.nbytes + written)


def _without_support(rival: Callable[..., Any], key: jax.Array, top_k: int | None, logits: jax.Array, _: Any) -> Any:
    return rival(logits.astype(jnp.float32), key, top_k=top_k, top_p=TOP_P)


def head_cases(sizes: Sizes, dtype: Any, kernel: str, rng: np.random.Generator) -> list[Case]:
    """Forward, and both backward passes, on supports like those of a language model's samples."""
    arrays = head_inputs(rng, sizes.tokens, sizes.depth, sizes.vocab, dtype)
    counts, ids = (np.asarray(arrays[place]) for place in (4, 2))
    itemsize = jnp.dtype(dtype).itemsize
    hidden_bytes, head_bytes = (itemsize * arrays[place].size for place in (0, 1))
    read = hidden_bytes + itemsize * sizes.depth * len(np.unique(ids)) + 4 * len(ids) + 4 * 5 * len(counts)
    forward = read + 4 * len(ids) + 8 * len(counts)
    scores = {KERNEL: functools.partial(gathered, kernel), PLAIN: functools.partial(gathered, "xla")}
    scores["dense"] = functools.partial(gpu_rivals.dense, sizes.chunk)
    shape = f"N = {sizes.tokens}, D = {sizes.depth}, V = {sizes.vocab:,}, {jnp.dtype(dtype).name}"

    def case(what: str, fewest_bytes: int, argnums: tuple[int, ...]) -> Case:
        programs = {name: functools.partial(_with_gradients, score, argnums) for name, score in scores.items()}
        return Case(f"head, {what}, {shape}", programs, [arrays], fewest_bytes=fewest_bytes, is_head=True)

    return [
        case("forward", forward, ()),
        case("forward + backward, frozen head", forward + hidden_bytes, (0,)),
        case("forward + backward", forward + hidden_bytes + head_bytes, (0, 1)),
    ]


def _with_gradients(score: Callable[..., jax.Array], argnums: tuple[int, ...], *arrays: jax.Array) -> Any:
    """Log-probabilities, and gradients of their weighted sum."""

    def loss(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        logprobs = score(*arrays)
        return (logprobs * arrays[7]).sum(), logprobs

    if not argnums:
        return score(*arrays), ()
    (_, logprobs), gradients = jax.value_and_grad(loss, argnums, has_aux=True)(*arrays)
    return logprobs, gradients


def gathered(implementation: str, hidden: jax.Array, head: jax.Array, *rest: jax.Array) -> jax.Array:
    """The log-probabilities of `gathered_head`."""
    return gathered_head(hidden, head, *rest[:5], implementation=implementation).logprobs


def gathered_with_entropy(implementation: str, *arrays: jax.Array) -> jax.Array:
    """All outputs of `gathered_head` in one number per token, so that gradients flow through each of them."""
    scores = gathered_head(*arrays[:7], implementation=implementation)
    rows = jnp.repeat(jnp.arange(len(scores.logprobs)), arrays[4], total_repeat_length=len(scores.kept_logits))
    sums = jax.ops.segment_sum(scores.kept_logits, rows, len(scores.logprobs))
    return scores.logprobs - 0.5 * scores.entropy + 0.1 * sums


def head_check(rng: np.random.Generator, dtype: Any, kernel: str, num_tokens: int, depth: int) -> Case:
    """Every output and both gradients, over supports of which one is empty and its hidden state NaN."""
    hidden, head, ids, starts, counts, *rest = head_inputs(rng, num_tokens, depth, 5003, dtype)
    # The last row: its cells then belong to nobody.
    counts, hidden = counts.at[-1].set(0), hidden.at[-1].set(jnp.nan)
    rest[2] = rest[2].at[-1].set(0)
    programs = {
        name: functools.partial(_with_gradients, functools.partial(gathered_with_entropy, implementation), (0, 1))
        for name, implementation in ((KERNEL, kernel), (PLAIN, "xla"))
    }
    name = f"head, N = {num_tokens}, D = {depth}, V = 5003, {jnp.dtype(dtype).name}"
    return Case(name, programs, [(hidden, head, ids, starts, counts, *rest)], is_head=True)


def support_sizes(num: int) -> np.ndarray:
    """Sizes of supports as top-p leaves them: mean 8, median 2, 46 % ones, 99 % at most 82, over 2048 quantiles."""
    normal = np.array([statistics.NormalDist().inv_cdf((index + 0.5) / num) for index in range(num)])
    # The logarithm as a parabola of a normal deviate, fitted to these four numbers.
    return np.maximum(np.exp(0.884 + 1.889 * normal - 0.16 * normal**2), 1).astype(np.int64)


def head_inputs(rng: np.random.Generator, num_tokens: int, depth: int, vocab: int, dtype: Any) -> tuple[jax.Array, ...]:
    """hidden, head, ids, starts, counts, drawn ids, temperatures, weights, packed bits."""
    counts = rng.permutation(support_sizes(num_tokens))
    lists = []
    for count in counts:
        # Frequent ids are frequent, as in texts: their logarithms are uniform.
        ids = np.unique(np.exp(rng.uniform(0, np.log(vocab), 4 * count + 8)).astype(np.int64) - 1)
        lists.append(np.sort(rng.permutation(ids)[:count]))
    counts = np.array([len(ids) for ids in lists])
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), 2)
    hidden = jax.random.normal(keys[0], (num_tokens, depth), dtype)
    head = jax.random.normal(keys[1], (vocab, depth), dtype) / depth**0.5
    packed = Support.from_lists([ids.tolist() for ids in lists], vocab, width=1).packed
    host = (
        np.concatenate(lists).astype(np.int32),
        (np.cumsum(counts) - counts).astype(np.int32),
        counts.astype(np.int32),
        np.array([rng.choice(ids) for ids in lists], np.int32),
        np.ones(num_tokens, np.float32),
        rng.normal(size=num_tokens).astype(np.float32),
    )
    return (hidden, head, *map(jnp.asarray, host), packed)


def processed(rng: np.random.Generator, num_rows: int, vocab: int, dtype: Any) -> jax.Array:
    """Logits after the filters: a few hundred ids of each row are left."""
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), 2)
    is_kept = jax.random.uniform(keys[0], (num_rows, vocab)) < 300 / vocab
    return jnp.where(is_kept, jax.random.normal(keys[1], (num_rows, vocab)), -jnp.inf).astype(dtype)


def _copies(logits: jax.Array) -> list[tuple[jax.Array]]:
    num = min(max(-(-COLD_BYTES // logits.nbytes), 2), MOST_COPIES)
    return [(logits,), *((jnp.roll(logits, jnp.int32(64 * index), axis=1),) for index in range(1, num))]


def _shape(logits: jax.Array) -> str:
    return f"[{logits.shape[0]}, {logits.shape[1]:,}] {logits.dtype.name}"


def checked_cases(sizes: Sizes, kernel: str, rng: np.random.Generator) -> list[Case]:
    """What is compared and not timed: mixed settings, adversarial rows, every output and gradient."""
    vocab, cases = 5003, []
    host = peaked_rows(rng, sizes.checked, sizes.vocab), adversarial_rows(rng, sizes.adversarial, vocab)
    for dtype in _dtypes(sizes):
        peaked, rows = (jnp.asarray(array).astype(dtype) for array in host)
        mixed, others = (mixed_settings(rng, num) for num in (sizes.checked, sizes.adversarial))
        if sizes.checked:
            cases.append(sampling_case("sample, mixed settings", peaked, mixed, 64, kernel, is_timed=False))
        cases += [
            compact_case(processed(rng, max(sizes.rows), sizes.vocab, dtype), sizes.width, kernel),
            compact_case(rows, 17, kernel),
            sampling_case("sample, adversarial rows", rows, others, 17, kernel, is_timed=False),
            head_check(rng, dtype, kernel, sizes.tokens // 4, 100),
        ]
    return [
        dataclasses.replace(case, programs={name: case.programs[name] for name in (KERNEL, PLAIN)}) for case in cases
    ]


def timed_sections(sizes: Sizes, kernel: str, rng: np.random.Generator) -> dict[str, Callable[[], list[Case]]]:
    """What is timed, in the order in which it is: the most telling first."""
    shapes = [(num, jnp.float32) for num in sizes.rows] + [(num, jnp.bfloat16) for num in sizes.half_rows]
    peaked = peaked_rows(rng, max(sizes.rows), sizes.vocab)
    flat = flat_rows(rng, max(sizes.flat_rows, default=0), sizes.vocab)

    def compaction() -> list[Case]:
        return [compact_case(processed(rng, num, sizes.vocab, dtype), sizes.width, kernel) for num, dtype in shapes]

    def with_top_k() -> list[Case]:
        name, params = f"sample, top-k {TOP_K}, top-p {TOP_P}", SamplingParams(top_k=TOP_K, top_p=TOP_P, seed=0)
        return [
            sampling_case(name, jnp.asarray(peaked[:num]).astype(dtype), [params] * num, 64, kernel)
            for num, dtype in shapes
        ]

    def with_top_p() -> list[Case]:
        params, cases = SamplingParams(top_p=TOP_P, seed=0), []
        for kind, rows, numbers in (("peaked", peaked, sizes.rows), ("flat", flat, sizes.flat_rows)):
            name = f"sample, top-p {TOP_P}, {kind} rows"
            cases += [sampling_case(name, jnp.asarray(rows[:num]), [params] * num, 64, kernel) for num in numbers]
        return cases

    def heads() -> list[Case]:
        return [case for dtype in _dtypes(sizes) for case in head_cases(sizes, dtype, kernel, rng)]

    return {"compact": compaction, "top-k and top-p": with_top_k, "head": heads, "top-p": with_top_p}


def _dtypes(sizes: Sizes) -> tuple[Any, ...]:
    return (jnp.float32, jnp.bfloat16) if sizes.half_rows else (jnp.float32,)
