"""What `pip install jaxmask` gives, run by `check_package.py` in an environment with nothing else, outside a checkout.

python installed.py VERSION
"""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import mock_model
import numpy as np

import jaxmask
from jaxmask import SamplingBatch, SamplingParams, generate, sample, support_log_probs

warnings.simplefilter("error")
BIN = Path(sys.prefix) / "bin"


def main(version: str) -> None:
    check_install(version)
    check_sample()
    check_audit(check_generate())
    print(f"jaxmask {version} works with {sorted(one.name for one in importlib.metadata.distributions())}")


def check_install(version: str) -> None:
    assert jaxmask.__version__ == importlib.metadata.version("jaxmask") == version
    folder = Path(jaxmask.__file__).parent
    assert folder.is_relative_to(sys.prefix), folder
    assert (folder / "py.typed").exists()
    for name in ("models", "train", "serve", "tests", "flax", "optax", "beartype"):
        assert importlib.util.find_spec(name) is None, f"{name} can be imported"
    assert all(hasattr(jaxmask, name) for name in jaxmask.__all__)


def check_sample() -> None:
    """The README's first example."""
    hidden = jax.random.normal(jax.random.key(0), (4, 64))
    head = jax.random.normal(jax.random.key(1), (32_000, 64)) / 8
    params = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=7)
    batch = SamplingBatch.from_params([params] * 4, vocab_size=32_000, support_bound=50)
    drawn = sample(hidden @ head.T, batch, step=0, width=50)
    assert ((drawn.support.counts > 0) & (drawn.support.counts <= 50)).all()
    logprobs = support_log_probs(hidden, head, drawn.support, drawn.token_ids, temperature=0.8)
    assert jnp.abs(logprobs - drawn.logprobs).max() < 1e-5


def check_generate() -> Path:
    """A rollout of a model that is a table, and the file it is saved to."""
    batch = SamplingBatch.from_params(
        [SamplingParams(top_k=5, seed=row, max_tokens=6) for row in range(4)],
        vocab_size=mock_model.V,
        eos_token_ids=[0],
        support_bound=5,
    )
    prompts, lengths = jnp.array([[5, 6], [8, 0]]), jnp.array([2, 1])
    rollout = generate(mock_model.random_model(), batch, prompts, lengths, max_new_tokens=6, width=5, group_size=2)
    assert np.asarray(rollout.support.contains(rollout.token_ids))[np.asarray(rollout.loss_mask)].all()
    path = Path("rollout.npz").absolute()
    jaxmask.save_rollout(path, rollout)
    again = jaxmask.load_rollout(path)
    assert (again.token_ids == rollout.token_ids).all()
    assert again.support.to_lists() == rollout.support.to_lists()
    return path


def check_audit(path: Path) -> None:
    """The console script and the module say that the rollout is fit, and each writes its report."""
    for command in ([BIN / "jaxmask"], [sys.executable, "-m", "jaxmask"]):
        done = subprocess.run(
            [*command, "audit", path, "--json", "--html", "page.html"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout)
        assert Path("page.html").read_text().lower().startswith("<!doctype html>")
        Path("page.html").unlink()


if __name__ == "__main__":
    main(sys.argv[1])
