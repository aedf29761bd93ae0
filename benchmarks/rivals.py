"""Samplers as others write them: a token per row, one setting for the whole batch, no support.

Each is written from the description of the method. Arguments are logits [B, V] (float32, temperature 1), a source of
randomness, top_k (None is off) and top_p. On rows without ties they draw from one and the same distribution, except
that `tunix` measures top-p against the mass of the whole vocabulary even after top-k.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

try:
    import torch
except ImportError:
    torch = None

# Candidates of the window where there is no top-k: nuclei of real rows nearly always fit.
WINDOW = 2048

_jit = functools.partial(jax.jit, static_argnames=("top_k", "top_p"))


@_jit
def tunix(logits: jax.Array, key: jax.Array, top_k: int | None, top_p: float) -> jax.Array:
    """Tunix: probabilities of the vocabulary, `lax.top_k` of them (of all without top-k), exclusive running sum."""
    probabilities = jax.nn.softmax(logits, axis=-1)
    leading, ids = jax.lax.top_k(probabilities, top_k or logits.shape[1])
    before = jnp.cumsum(leading, axis=-1) - leading
    leading = jnp.where(before > top_p, 0.0, leading)
    leading /= leading.sum(axis=-1, keepdims=True)
    column = jax.random.categorical(key, jnp.log(leading), axis=-1)
    return jnp.take_along_axis(ids, column[:, None], axis=-1)[:, 0]


@_jit
def skyrl(logits: jax.Array, key: jax.Array, top_k: int | None, top_p: float) -> jax.Array:
    """SkyRL: top-k by the k-th value of `lax.top_k`, then top-p by an argsort of the whole row, scattered back."""
    if top_k is not None:
        kth = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    ids = jnp.argsort(-logits, axis=-1)
    descending = jnp.take_along_axis(logits, ids, axis=-1)
    probabilities = jax.nn.softmax(descending, axis=-1)
    is_kept = (jnp.cumsum(probabilities, axis=-1) - probabilities < top_p).at[:, 0].set(True)
    rows = jnp.arange(logits.shape[0])[:, None]
    filtered = jnp.zeros_like(logits).at[rows, ids].set(jnp.where(is_kept, descending, -jnp.inf))
    return jax.random.categorical(key, filtered, axis=-1)


def torch_sort(logits, generator, top_k: int | None, top_p: float):
    """vLLM's filters where it has no kernel: one ascending sort, scattered back; then exponential noise."""
    ascending, ids = logits.sort(dim=-1)
    if top_k is not None:
        ascending.masked_fill_(ascending < ascending[:, -top_k, None], -torch.inf)
    mass = ascending.softmax(dim=-1)
    is_dropped = torch.cumsum(mass, dim=-1, out=mass) <= 1 - top_p
    is_dropped[:, -1] = False
    ascending.masked_fill_(is_dropped, -torch.inf)
    probabilities = ascending.scatter(-1, ids, ascending).softmax(dim=-1)
    noise = torch.empty_like(probabilities).exponential_(generator=generator)
    return probabilities.div_(noise).argmax(dim=-1)


def torch_top_k(logits, generator, top_k: int | None, top_p: float):
    """The leading logits by `torch.topk`; without top-k, a window of them and the exact denominator.

    Rows whose nucleus outgrows the window are sorted.
    """
    values, ids = logits.topk(top_k or min(WINDOW, logits.shape[1]), dim=-1)
    whole = values if top_k is not None else logits
    probabilities = (values - whole.logsumexp(dim=-1, keepdim=True)).exp()
    mass = probabilities.cumsum(dim=-1)
    probabilities.masked_fill_(mass - probabilities >= top_p, 0.0)
    token_ids = ids.gather(-1, probabilities.multinomial(1, generator=generator))[:, 0]
    is_short = mass[:, -1] < top_p
    if top_k is None and is_short.any():
        token_ids[is_short] = torch_sort(logits[is_short], generator, None, top_p)
    return token_ids


def prepared(logits: jax.Array, top_k: int | None, top_p: float, seed: int = 0) -> dict[str, Callable[[], object]]:
    """Every rival that can run here, by name, ready to draw from these logits; the torch ones only where torch is."""
    key = jax.random.key(seed)
    runs: dict[str, Callable[[], object]] = {
        rival.__name__: functools.partial(rival, logits, key, top_k=top_k, top_p=top_p) for rival in (tunix, skyrl)
    }
    if torch is not None:
        tensor = torch.from_numpy(np.array(logits))
        generator = torch.Generator().manual_seed(seed)
        for rival in (torch_sort, torch_top_k):
            runs[rival.__name__] = functools.partial(rival, tensor, generator, top_k=top_k, top_p=top_p)
    return runs
