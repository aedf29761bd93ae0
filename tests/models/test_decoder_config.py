import dataclasses

import pytest

from models.config import DecoderConfig, LinearRopeScaling, Llama3RopeScaling, LoraConfig

SMALL = DecoderConfig(64, 2, 16, 4, 2, 8, 24, 1e4, None, 1e-6, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 15}, "head_dim=15.*even"),
        ({"num_layers": 0}, "num_layers=0.*>= 1"),
        ({"vocab_size": True}, "vocab_size=True.*integer"),
        ({"rope_theta": float("inf")}, "rope_theta=inf.*finite"),
        ({"max_length": -1}, "max_length=-1.*>= 1"),
        ({"num_layers": 1001}, "num_layers=1001.*at most 1000"),
        ({"sliding_window": 0}, "sliding_window=0.*>= 1"),
        ({"full_layers": (2,)}, r"full_layers=\(2,\).*below num_layers=2"),
        ({"unrotated_layers": (-1,)}, "unrotated_layers"),
        ({"attention_softcap": 0.0}, "attention_softcap=0.0.*> 0"),
        ({"attention_scale": float("nan")}, "attention_scale=nan"),
        ({"activation": "relu"}, "activation='relu'.*silu"),
        ({"attention": "flash"}, "attention='flash'.*cudnn"),
        ({"compute_dtype": "int8"}, "compute_dtype='int8'.*bfloat16"),
    ],
)
def test_impossible_values_are_refused(changes, message, unchecked):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0.5, 1.0, 4.0, 32), "factor=0.5"),
        ((8.0, 0.0, 4.0, 32), "low_freq_factor=0.0"),
        ((8.0, 4.0, 4.0, 32), "high_freq_factor=4.0.*low_freq_factor=4.0"),
        ((8.0, 1.0, 4.0, 0), "original_max_length=0"),
    ],
)
def test_impossible_scalings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Llama3RopeScaling(*values)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearRopeScaling(0.5), "factor=0.5.*>= 1"),
        (lambda: LoraConfig(rank=0, alpha=1.0), "rank=0.*>= 1"),
        (lambda: LoraConfig(rank=2, alpha=0.0), "alpha=0.0.*> 0"),
        (lambda: LoraConfig(rank=2, alpha=1.0, targets=("query", "head")), "targets=.*head.*one or more of"),
        (lambda: LoraConfig(rank=2, alpha=1.0, targets=()), r"targets=\(\)"),
        (lambda: LoraConfig(rank=2, alpha=1.0, targets=("up", "up")), "each once"),
    ],
)
def test_impossible_parts_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_windows_and_wavelengths_of_each_layer():
    config = dataclasses.replace(SMALL, sliding_window=4, full_layers=(1,), local_rope_theta=100.0)
    assert [config.window_of(layer) for layer in (0, 1)] == [4, None]
    assert [config.theta_of(layer) for layer in (0, 1)] == [(100.0, None), (1e4, None)]
    assert SMALL.theta_of(0) == (1e4, None)
    assert dataclasses.replace(SMALL, unrotated_layers=(0,)).theta_of(0) is None
    assert SMALL.score_scale == 8**-0.5
    assert dataclasses.replace(SMALL, attention_scale=0.25).score_scale == 0.25
