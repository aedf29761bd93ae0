"""Fixtures of the learner's tests."""

import functools

import jax
import jax.numpy as jnp
import pytest
from tiny import OPTIMIZER, make_model

from train.state import TrainState, init_state


@functools.cache
def first_state() -> TrainState:
    return init_state(make_model(), OPTIMIZER, seed=3)


@pytest.fixture
def state() -> TrainState:
    """A fresh state: iterations donate theirs."""
    return jax.tree.map(jnp.copy, first_state())
