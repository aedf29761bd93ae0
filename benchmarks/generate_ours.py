"""Our side of the generation benchmark: `jaxmask.generate` on a decoder, and the same loop without supports."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from generate_case import Case

import models
from jaxmask import SamplingBatch, SamplingParams, decoding, generate
from jaxmask.decoding import Decoding, StepOptions
from jaxmask.rollout import Rollout


class Ours:
    """Supports on: compact cells as wide as top_k, so every support is whole in them."""

    def __init__(self, decoder: models.Decoder):
        self.decoder = decoder

    def inputs(self, case: Case, returns_support: bool = True) -> tuple[SamplingBatch, jax.Array, jax.Array]:
        """Settings, prompts and lengths; one settings row for each prompt."""
        wanted = None if returns_support else False
        params = [
            SamplingParams(
                temperature=case.temperature,
                top_k=case.top_k,
                top_p=case.top_p,
                max_tokens=case.max_new_tokens,
                seed=row,
                ignore_eos=True,
                return_sampling_mask=wanted,
            )
            for row in range(case.num_rows)
        ]
        # With the promise, programs are the same whether or not rows return their supports.
        batch = SamplingBatch.from_params(params, vocab_size=self.decoder.vocab_size, support_bound=case.top_k)
        lengths = jnp.full(case.num_rows, case.prompt_length, jnp.int32)
        return batch, jnp.asarray(case.prompts, jnp.int32), lengths

    def rollout(self, case: Case, group_size: int = 1, returns_support: bool = True) -> Rollout:
        return generate(
            self.decoder,
            *self.inputs(case, returns_support),
            max_new_tokens=case.max_new_tokens,
            width=case.top_k,
            group_size=group_size,
        )

    def run(self, case: Case, **options) -> dict:
        """From lists to lists, as rivals do; supports come to the host as arrays."""
        found = self.rollout(case, **options)
        token_ids, logprobs, lengths, support = jax.device_get(
            (found.token_ids, found.logprobs, found.lengths, found.support)
        )
        return {"token_ids": _cut(token_ids, lengths), "logprobs": _cut(logprobs, lengths), "support": support}

    def run_without_supports(self, case: Case) -> dict:
        """The same draws, but only tokens and log-probabilities are recorded: what supports alone need is never run."""
        batch, prompt_ids, prompt_lengths = self.inputs(case)
        options = StepOptions(width=case.top_k)
        found = _tokens_and_logprobs(
            self.decoder, batch, prompt_ids, prompt_lengths, max_new_tokens=case.max_new_tokens, options=options
        )
        token_ids, logprobs, lengths = jax.device_get(found)
        return {"token_ids": _cut(token_ids, lengths), "logprobs": _cut(logprobs, lengths)}

    def token_logprobs(self, token_ids: list[int]) -> list[float]:
        logits = jax.jit(lambda decoder, ids: decoder.logits(ids))(self.decoder, jnp.asarray([token_ids]))
        logprobs = np.asarray(jax.nn.log_softmax(logits[0, :-1]))
        return logprobs[np.arange(len(token_ids) - 1), token_ids[1:]].tolist()


def _cut(cells: np.ndarray, lengths: np.ndarray) -> list[list]:
    return [row[:length].tolist() for row, length in zip(cells, lengths, strict=True)]


@functools.partial(jax.jit, static_argnames=("max_new_tokens", "options"))
def _tokens_and_logprobs(
    model: models.Decoder,
    batch: SamplingBatch,
    prompt_ids: jax.Array,
    prompt_lengths: jax.Array,
    *,
    max_new_tokens: int,
    options: StepOptions,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`generate` with tables of tokens and log-probabilities alone."""
    state = decoding.start(model, batch, prompt_ids, prompt_lengths, max_new_tokens=max_new_tokens)
    rows = jnp.arange(batch.num_rows, dtype=jnp.int32)
    shape = (batch.num_rows, max_new_tokens)

    def is_going(carry: tuple[Decoding, jax.Array, jax.Array]) -> jax.Array:
        return carry[0].is_running.any()

    def go(carry: tuple[Decoding, jax.Array, jax.Array]) -> tuple[Decoding, jax.Array, jax.Array]:
        before, token_ids, logprobs = carry
        state, new = decoding.step(model, batch, before, options)
        columns = jnp.where(new.counts > 0, before.lengths, max_new_tokens)
        token_ids = token_ids.at[rows, columns].set(new.token_ids[:, 0], mode="drop")
        logprobs = logprobs.at[rows, columns].set(new.logprobs[:, 0], mode="drop")
        return state, token_ids, logprobs

    tables = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
    state, token_ids, logprobs = jax.lax.while_loop(is_going, go, (state, *tables))
    return token_ids, logprobs, state.lengths
