"""Fixtures of the learner's tests."""

import pytest
from tiny import OPTIMIZER, make_model

from train.state import init_state


@pytest.fixture
def state():
    """A fresh state: iterations donate theirs."""
    return init_state(make_model(), OPTIMIZER, seed=3)
