"""What a run starts with: its loop, its task and its first state, from its configuration."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import models
from models import lora
from train import processes
from train.loop import DeviceLoop, HostLoop, Loop
from train.progress import RunState
from train.run_config import RunConfig, mesh_sizes
from train.state import copied, init_state, make_optimizer
from train.step import collect_for_host
from train.tasks import DeviceTask, HostTask, Prompts, device_task, text_task


@dataclasses.dataclass(frozen=True)
class Built:
    """A run before its first iteration.

    Attributes:
      loop: runs an iteration.
      task: what it is trained on.
      run: the first state.
      tokenizer: of the model; None where the task has an alphabet of its own.
    """

    loop: Loop
    task: DeviceTask | HostTask
    run: RunState
    tokenizer: models.Tokenizer | None = None


def build(config: RunConfig) -> Built:
    """What a run starts with.

    Raises:
      ValueError: the model has no tokenizer and the task needs one, completions do not fit the model, the task is one
        of the device and the run wants overlap, the mesh is larger than what there is, or, with several processes, it
        leaves devices out.
    """
    optimizer = make_optimizer(config.grpo, config.iterations)
    rules = _rules(config)
    on_device = device_task(config.data)
    if on_device is not None:
        if config.overlap:
            raise ValueError(f"overlap is for rewards of the host; task {config.data.task!r} is scored on the device.")
        model = _prepared(_tiny(config, on_device.vocab_size, rules), config)
        _check_length(model, on_device.prompt_width, config)
        loop: Loop = DeviceLoop(on_device, config.grpo, optimizer, _reference(model, config))
        return Built(loop, on_device, _fresh(model, optimizer, config))
    if config.model == "tiny":
        raise ValueError(f"task {config.data.task!r} is of text; model must be one with a tokenizer, got 'tiny'.")
    model, tokenizer = models.load(config.model, jnp.dtype(config.base_dtype), rules)
    if tokenizer is None:
        raise ValueError(f"task {config.data.task!r} needs a tokenizer, and model {config.model!r} has none.")
    model = _prepared(model, config)
    task = text_task(config.data, tokenizer, seed=config.seed)
    _check_length(model, task.prompt_width, config)
    loop = HostLoop(task, config.grpo, optimizer, _reference(model, config), config.overlap)
    return Built(loop, task, _fresh(model, optimizer, config), tokenizer)


def _fresh(model: models.Decoder, optimizer: optax.GradientTransformation, config: RunConfig) -> RunState:
    state = init_state(model, optimizer, config.seed, config.grpo)
    # Where a restored state lies, too: by request, which is part of a program, so that a resumed run compiles nothing
    # anew.
    return RunState(jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding), state))


def with_ahead(run: RunState, task: HostTask, config: RunConfig) -> RunState:
    """The run with a description of a rollout drawn ahead, as checkpoints of runs that overlap hold one."""
    shape = (config.grpo.num_prompts, task.prompt_width)
    prompts = Prompts(np.zeros(shape, np.int32), np.ones(shape[0], np.int32))
    options: dict[str, Any] = {"vocab_size": task.vocab_size, "eos_token_ids": task.eos_token_ids}
    rollout = jax.eval_shape(functools.partial(collect_for_host, config=config.grpo, **options), run.train, prompts)
    placed = jax.tree.map(lambda leaf: processes.everywhere(leaf, run.train.model.rules), rollout)
    return dataclasses.replace(run, ahead=placed)


def _rules(config: RunConfig) -> models.MeshRules | None:
    sizes = mesh_sizes(config.mesh)
    if jax.process_count() > 1 and math.prod(sizes.values()) != jax.device_count():
        raise ValueError(
            f"mesh must cut over all {jax.device_count()} devices of the {jax.process_count()} processes, as "
            f"'data={jax.device_count()}' does, got {config.mesh!r}."
        )
    if not sizes:
        return None
    mesh = models.make_mesh(**sizes)
    processes.introduce(mesh)
    return models.MeshRules(mesh)


def _reference(model: models.Decoder, config: RunConfig) -> models.Decoder | None:
    """The policy before the first iteration, also of a run that is resumed; None where the loss has no KL.

    None with adapters too: the step finds it in the state, as the base without them; and where the reference changes,
    since the state then holds it.
    """
    if config.grpo.kl_coefficient == 0 or config.lora is not None or config.grpo.reference_every:
        return None
    return copied(model)


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


def _tiny(config: RunConfig, vocab_size: int, rules: models.MeshRules | None) -> models.Decoder:
    if config.model != "tiny":
        raise ValueError(f"task {config.data.task!r} has its own alphabet; model must be 'tiny', got {config.model!r}.")
    shape = tiny_shape(vocab_size, fixed_order=rules is None)
    model = models.Decoder(shape, rngs=nnx.Rngs(config.seed), dtype=jnp.dtype(config.base_dtype))
    return model if rules is None else models.shard(model, rules)


def tiny_shape(vocab_size: int, *, fixed_order: bool) -> models.DecoderConfig:
    """The model "tiny".

    Args:
      vocab_size: of the task.
      fixed_order: see `models.DecoderConfig`.
    """
    return models.DecoderConfig(
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
        fixed_order=fixed_order,
    )
