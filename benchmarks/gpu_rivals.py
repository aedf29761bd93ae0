"""What others do on a GPU instead of our kernels, beside the samplers of `rivals.py`."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import rivals

from jaxmask import Support, bits


def scattered(logits: jax.Array, width: int) -> Support:
    """Compaction as `jnp.nonzero` has it: a running sum over the vocabulary, and a scatter of all ids."""
    num_rows, vocab = logits.shape
    is_kept = jnp.isfinite(logits)
    ends = jnp.cumsum(is_kept, axis=1, dtype=jnp.int32)
    rows, ids = jnp.arange(num_rows)[:, None], jnp.arange(vocab, dtype=jnp.int32)[None, :]
    cells = jnp.full((num_rows, width), vocab, jnp.int32)
    cells = cells.at[rows, jnp.where(is_kept, ends - 1, width)].set(jnp.broadcast_to(ids, logits.shape), mode="drop")
    return Support(cells, ends[:, -1], jnp.packbits(is_kept, axis=1, bitorder="little"), vocab)


def dense(
    chunk: int,
    hidden: jax.Array,
    head: jax.Array,
    _ids: jax.Array,
    _starts: jax.Array,
    _counts: jax.Array,
    drawn: jax.Array,
    temperature: jax.Array,
    _weights: jax.Array,
    packed: jax.Array,
) -> jax.Array:
    """Trainers' way: logits of the vocabulary (TF32 for float32), masked by packed bits, log-softmax, in chunks."""

    @jax.checkpoint
    def score(part: tuple[jax.Array, ...]) -> jax.Array:
        part_hidden, part_packed, part_drawn, part_temperature = part
        logits = jnp.einsum("nd,vd->nv", part_hidden, head, preferred_element_type=jnp.float32)
        kept = bits.unpack_bytes(part_packed, head.shape[0])
        masked = jnp.where(kept, logits / part_temperature[:, None], -jnp.inf)
        return jnp.take_along_axis(jax.nn.log_softmax(masked, axis=1), part_drawn[:, None], axis=1)[:, 0]

    parts = jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), (hidden, packed, drawn, temperature))
    return jax.lax.map(score, parts).reshape(-1)


def torch_rivals(num_rows: int, top_k: int | None, top_p: float) -> dict[str, Callable[..., Any]]:
    """The samplers of torch, vLLM and FlashInfer that are installed; they read the memory of JAX's logits."""
    torch, is_on_gpu = rivals.torch, jax.default_backend() == "gpu"
    if torch is None or (is_on_gpu and not torch.cuda.is_available()):
        return {}
    generator = torch.Generator(device="cuda" if is_on_gpu else "cpu").manual_seed(0)
    tensors: dict[int, Any] = {}

    def tensor_of(logits: jax.Array) -> Any:
        """Looked at once per array, so that a burst does not wait for it; the array is kept, and so is its id."""
        if id(logits) not in tensors:
            tensors[id(logits)] = (logits, torch.from_dlpack(logits))
        return tensors[id(logits)][1].float()

    runs: dict[str, Callable[..., Any]] = {
        rival.__name__.replace("_", " "): lambda logits, rival=rival: rival(logits, generator, top_k, top_p)
        for rival in (rivals.torch_sort, rivals.torch_top_k)
    }
    if is_on_gpu:
        runs |= _gpu_samplers(torch, num_rows, generator, top_k, top_p)
    return {name: lambda logits, _, run=run: run(tensor_of(logits)) for name, run in runs.items()}


def _gpu_samplers(
    torch: Any, num_rows: int, generator: Any, top_k: int | None, top_p: float
) -> dict[str, Callable[..., Any]]:
    vllm, flashinfer = imported("vllm.v1.sample.ops.topk_topp_triton"), imported("flashinfer.sampling")
    top_ps = torch.full((num_rows,), top_p, device="cuda")
    top_ks = None if top_k is None else torch.full((num_rows,), top_k, dtype=torch.int32, device="cuda")

    def vllm_triton(logits: Any) -> Any:
        # A copy: it may filter in place.
        masked = vllm.apply_top_k_top_p_triton(logits.clone(), top_ks, top_ps)
        probabilities = masked.softmax(dim=-1)
        noise = torch.empty_like(probabilities).exponential_(generator=generator)
        return probabilities.div_(noise).argmax(dim=-1)

    def flashinfer_sampling(logits: Any) -> Any:
        probabilities = logits.softmax(dim=-1)
        if top_k is None:
            return flashinfer.top_p_sampling_from_probs(probabilities, top_p)
        return flashinfer.top_k_top_p_sampling_from_probs(probabilities, top_k, top_p)

    return ({"vLLM's Triton": vllm_triton} if vllm else {}) | (
        {"FlashInfer": flashinfer_sampling} if flashinfer else {}
    )


@functools.cache
def imported(module: str) -> Any:
    """The module; None where it cannot be imported."""
    try:
        return importlib.import_module(module)
    # Whatever a package that does not fit the machine raises.
    except Exception:
        return None
