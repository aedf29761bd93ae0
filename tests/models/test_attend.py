"""Which attention runs: fused routes are spied on, since there is no GPU here."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import attend as module
from models.attend import attend
from models.config import DecoderConfig

CONFIG = DecoderConfig(64, 2, 16, 4, 2, 8, 24, 1e4, None, 1e-6, True, sliding_window=3, full_layers=(1,))


def arrays(dtype=jnp.float32):
    noise = np.random.default_rng(7)
    shapes = ((2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8))
    return [jnp.asarray(noise.standard_normal(shape), dtype) for shape in shapes]


@pytest.mark.parametrize("layer", [0, 1])
def test_what_the_fused_route_is_asked_for_is_what_plain_xla_computes(layer, monkeypatch):
    """`jax.nn.dot_product_attention` by its own XLA implementation, with the arguments that cuDNN would get."""
    asked = []
    fused = jax.nn.dot_product_attention

    def spy(*inputs, implementation, **options):
        asked.append(implementation)
        return fused(*inputs, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    found = attend(*arrays(), dataclasses.replace(CONFIG, attention="cudnn"), layer)
    expected = attend(*arrays(), CONFIG, layer)
    assert asked == ["cudnn"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("backend", "dtype", "changes", "expected"),
    [
        ("gpu", jnp.bfloat16, {}, "cudnn"),
        ("cpu", jnp.bfloat16, {}, None),
        ("gpu", jnp.float32, {}, None),
        ("gpu", jnp.bfloat16, {"attention_softcap": 5.0}, None),
        ("gpu", jnp.bfloat16, {"attention": "xla"}, None),
        ("gpu", jnp.bfloat16, {"fixed_order": True}, None),
    ],
)
def test_auto_takes_cudnn_where_it_can(backend, dtype, changes, expected, monkeypatch):
    asked = []

    def spy(queries, *_, implementation, **__):
        asked.append(implementation)
        return queries

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    monkeypatch.setattr(module.jax, "default_backend", lambda: backend)
    attend(*arrays(dtype), dataclasses.replace(CONFIG, **changes), 0)
    assert asked == ([] if expected is None else [expected])


def test_cudnn_refuses_a_soft_cap():
    config = dataclasses.replace(CONFIG, attention="cudnn", attention_softcap=5.0)
    with pytest.raises(NotImplementedError, match="no soft-cap"):
        attend(*arrays(jnp.bfloat16), config, 0)


def test_tokamax_gets_the_formula(monkeypatch):
    asked = {}

    class Tokamax:
        @staticmethod
        def dot_product_attention(queries, keys, values, **options):
            asked.update(options)
            return queries

    monkeypatch.setattr(module.importlib, "import_module", lambda name: {"tokamax": Tokamax}[name])
    attend(*arrays(), dataclasses.replace(CONFIG, attention="tokamax", attention_softcap=5.0), 0)
    assert asked == {"scale": 8**-0.5, "logits_soft_cap": 5.0, "is_causal": True, "local_window_size": (2, 0)}


def test_tokamax_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    with pytest.raises(ModuleNotFoundError, match="tokamax"):
        attend(*arrays(), dataclasses.replace(CONFIG, attention="tokamax"), 0)
