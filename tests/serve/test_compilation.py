import contextlib

import jax
import jax.numpy as jnp
import pytest
from engine_models import MODEL, WORDS

from jaxmask import SamplingParams
from serve.compilation import compiled_so_far, persistent_cache
from serve.llm import LLM

NAMES = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


def program(scale):
    @jax.jit
    def scaled(values):
        return jnp.tanh(values * scale)

    return scaled


def settings():
    return [getattr(jax.config, name) for name in NAMES]


def compiled_by(call):
    before = compiled_so_far()
    call()
    return compiled_so_far() - before


def test_programs_are_counted():
    values, scaled = jnp.arange(3.0), program(1.25)
    first, second = (compiled_by(lambda: scaled(values)) for _ in range(2))
    assert (first.num_programs, first.num_found) == (1, 0)
    assert 0 < first.seconds < 60
    assert (second.num_programs, second.seconds) == (0, 0.0)


def test_programs_are_found_again_and_the_settings_are_as_before(tmp_path):
    before, values = settings(), jnp.arange(5.0)
    with persistent_cache(tmp_path):
        first = compiled_by(lambda: program(1.5)(values))
        assert getattr(jax.config, NAMES[0]) == str(tmp_path)
    assert settings() == before
    num_files = len(list(tmp_path.iterdir()))
    assert num_files > 0
    program(1.75)(values)
    with persistent_cache(tmp_path):
        again = compiled_by(lambda: program(1.5)(values))
    with contextlib.suppress(KeyError), persistent_cache(tmp_path):
        raise KeyError
    assert settings() == before
    assert (first.num_found, again.num_programs, again.num_found) == (0, 1, 1)
    assert len([path for path in tmp_path.iterdir() if "atime" not in path.name]) == 1
    with persistent_cache(None):
        assert settings() == before


def test_an_engine_keeps_its_programs(tmp_path, monkeypatch):
    """What its steps compile, stands in the folder; an error changes nothing about that."""
    llm = LLM(MODEL, tokenizer=WORDS, compilation_cache_dir=tmp_path)
    before, values = settings(), jnp.arange(7.0)

    def step():
        program(2.5)(values)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "step", step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[3, 4]], SamplingParams(max_tokens=1, seed=0))
    assert settings() == before
    assert any(path.name.startswith("jit_scaled") for path in tmp_path.iterdir())
