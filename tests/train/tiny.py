"""A small learner on a small task, the same for all tests, so that its programs compile once."""

import jax
from flax import nnx

import models
from jaxmask import Rollout
from train.config import GRPOConfig
from train.state import TrainState, make_optimizer
from train.step import collect_for_host
from train.tasks import SortDigits

CONFIG = GRPOConfig(num_prompts=4, group_size=4, max_new_tokens=3, top_k=4, top_p=0.9, learning_rate=1e-3)
TASK = SortDigits(num_digits=3)
OPTIMIZER = make_optimizer(CONFIG, 10)


def make_model(seed: int = 0, width: int = 16) -> models.Decoder:
    shape = models.DecoderConfig(
        vocab_size=TASK.vocab_size,
        # What more layers add is of the models (`tests/models`); here every layer is compiled once more per program.
        num_layers=1,
        width=width,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        mlp_width=24,
        rope_theta=1e4,
        rope_scaling=None,
        norm_eps=1e-6,
        tie_embeddings=True,
        max_length=32,
        fixed_order=True,
    )
    # Larger than at initialisation, so that distributions are peaked and supports differ in size.
    return jax.tree.map(lambda leaf: leaf * 6 if leaf.ndim == 2 else leaf, models.Decoder(shape, rngs=nnx.Rngs(seed)))


def rollout_of(state: TrainState, config: GRPOConfig = CONFIG) -> Rollout:
    prompts = TASK.prompts(jax.random.key(5), config.num_prompts)
    return collect_for_host(state, prompts, config=config, vocab_size=TASK.vocab_size, eos_token_ids=())
