"""Fixtures of the learner's tests."""

import jaxtyping
import pytest
from tiny import OPTIMIZER, make_model

from train.state import init_state


@pytest.fixture
def unchecked():
    """No type checks: jax fills records with descriptions of arrays, and bad values must reach our own checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def state():
    """A fresh state: iterations donate theirs."""
    return init_state(make_model(), OPTIMIZER, seed=3)
