"""What a run starts with: its loop, its task and its first state, from its configuration."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import models
from models import lora
from train.config import RunConfig
from train.data_config import DataConfig
from train.loop import DeviceLoop, HostLoop, Loop
from train.state import TrainState, init_state, make_optimizer
from train.tasks import DeviceTask, HostTask, SortDigits, text_task


def build(config: RunConfig) -> tuple[Loop, DeviceTask | HostTask, TrainState]:
    """What a run starts with: its loop, its task, and the state before the first iteration.

    Raises:
      ValueError: the model has no tokenizer and the task needs one, or completions do not fit the model.
    """
    optimizer = make_optimizer(config.grpo, config.iterations)
    dtype = jnp.dtype(config.base_dtype)
    if config.task == "sort":
        sorting = SortDigits()
        model = _prepared(_decoder(config, sorting.vocab_size, dtype), config)
        _check_length(model, sorting.prompt_width, config)
        loop: Loop = DeviceLoop(sorting, config.grpo, optimizer, _reference(model, config))
        return loop, sorting, init_state(model, optimizer, config.seed)
    model, tokenizer = models.load(config.model, dtype)
    if tokenizer is None:
        raise ValueError(f"task {config.task!r} needs a tokenizer, and model {config.model!r} has none.")
    model = _prepared(model, config)
    chain_sum = text_task(DataConfig(task="chain-sum"), tokenizer, seed=config.seed)
    _check_length(model, chain_sum.prompt_width, config)
    loop = HostLoop(chain_sum, config.grpo, optimizer, _reference(model, config))
    return loop, chain_sum, init_state(model, optimizer, config.seed)


def _reference(model: models.Decoder, config: RunConfig) -> models.Decoder | None:
    """The policy before the first iteration, also of a run that is resumed; None where the loss has no KL.

    None with adapters too: the step finds it in the state, as the base without them.
    """
    if config.grpo.kl_coefficient == 0 or config.lora is not None:
        return None
    # A copy: the learner's arrays are donated.
    return jax.tree.map(jnp.copy, model)


def _prepared(model: models.Decoder, config: RunConfig) -> models.Decoder:
    """The decoder as the run computes with it, with the run's adapters."""
    if config.remat or config.compute_dtype is not None:
        model = models.configure(model, remat=config.remat, compute_dtype=config.compute_dtype)
    if config.lora is None:
        return model
    # Not the key of the weights: those of "tiny" come from the seed itself.
    return lora.attach(model, config.lora, nnx.Rngs(jax.random.fold_in(jax.random.key(config.seed), 1)))


def _check_length(model: models.Decoder, prompt_width: int, config: RunConfig) -> None:
    longest = model.max_length - prompt_width
    if config.grpo.max_new_tokens > longest:
        raise ValueError(
            f"max_new_tokens must be at most {longest} (the model's {model.max_length} positions less {prompt_width} "
            f"of the prompt), got {config.grpo.max_new_tokens}."
        )


def _decoder(config: RunConfig, vocab_size: int, dtype: DTypeLike) -> models.Decoder:
    if config.model != "tiny":
        raise ValueError(f"task {config.task!r} has its own alphabet; model must be 'tiny', got {config.model!r}.")
    shape = models.DecoderConfig(
        vocab_size=vocab_size,
        num_layers=2,
        width=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        mlp_width=192,
        rope_theta=10000.0,
        rope_scaling=None,
        norm_eps=1e-6,
        tie_embeddings=True,
        max_length=64,
        fixed_order=True,
    )
    return models.Decoder(shape, rngs=nnx.Rngs(config.seed), dtype=dtype)
