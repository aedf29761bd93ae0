"""Each example of demos/interop prints a ratio of 1 on supports, and another one over the vocabulary."""

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jaxtyping
import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "demos" / "interop"
# With the package that is not among our own needs.
HERE = {"vllm_then_train": None, "flax_nnx": None, "equinox_lm": "equinox"}
ELSEWHERE = {"tunix_grpo": "tunix", "maxtext_decoder": "maxtext"}
MAX_LINES = 59


@pytest.fixture
def as_users_have_it():
    """JAX's own settings: the strict ones of the tests are ours, and other people's layers promote."""
    jaxtyping.config.update("jaxtyping_disable", True)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    jaxtyping.config.update("jaxtyping_disable", False)


def check(printed: str) -> None:
    """The ratio on supports is 1 to float32's rounding; over the vocabulary it lacks what truncation took."""
    ratios = [float(number) for number in re.findall(r"[01]\.\d{6}", printed)]
    assert len(ratios) == 2, printed
    kept, full = ratios
    assert abs(kept - 1) < 1e-5, printed
    assert 0.8 < full < 0.98, printed


def needs(package: str | None) -> None:
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize("name", HERE)
@pytest.mark.usefixtures("as_users_have_it")
def test_an_example_prints_both_ratios(name, capsys):
    needs(HERE[name])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    check(printed)
    # Against vLLM's numbers, token by token.
    errors = [float(number) for number in re.findall(r"largest error (\S+)", printed)]
    assert not errors or errors[0] < 2e-5 < 1e-2 < errors[1], printed
    assert bool(errors) == (name == "vllm_then_train")


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_example_of_a_package_that_has_its_own_environment(name):
    """In a process of its own: these packages warn at import, and set up the whole process."""
    needs(ELSEWHERE[name])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    check(done.stdout)


def test_examples_are_short():
    long = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert set(long) == {f"{name}.py" for name in (*HERE, *ELSEWHERE)}
    assert max(long.values()) <= MAX_LINES, long
