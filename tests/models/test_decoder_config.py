import dataclasses
import json

import pytest

from models.config import DecoderConfig, Llama3RopeScaling

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
LLAMA = QWEN3 | {"model_type": "llama"}


def test_both_styles_of_hub_file_give_the_same_config(tiny_folder):
    new, old = (json.loads((tiny_folder / name).read_text()) for name in ("config.json", "config_v4.json"))
    assert "rope_parameters" in new
    assert "rope_parameters" not in old
    assert DecoderConfig.from_hf(new) == DecoderConfig.from_hf(old)


def test_qwen3_values_are_read_field_by_field():
    assert DecoderConfig.from_hf(QWEN3) == DecoderConfig(
        vocab_size=512,
        num_layers=3,
        width=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        mlp_width=96,
        rope_theta=1e6,
        rope_scaling=None,
        norm_eps=1e-6,
        tie_embeddings=True,
        attention_bias=False,
        qk_norm=True,
        max_length=256,
    )


def test_absent_and_null_fields_take_the_hub_defaults():
    hub = {name: value for name, value in LLAMA.items() if name not in ("num_key_value_heads", "tie_word_embeddings")}
    config = DecoderConfig.from_hf(hub | {"head_dim": None, "rope_scaling": None, "sliding_window": None})
    assert (config.num_kv_heads, config.head_dim, config.tie_embeddings) == (4, 12, False)


def test_qwen2_has_biases_and_an_unused_window_is_no_obstacle():
    config = DecoderConfig.from_hf(
        QWEN3 | {"model_type": "qwen2", "sliding_window": 32768, "use_sliding_window": False}
    )
    assert (config.attention_bias, config.qk_norm) == (True, False)


def test_llama3_scaling_is_read_in_the_old_spelling_too():
    scaling = {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    assert DecoderConfig.from_hf(LLAMA | {"rope_scaling": scaling}).rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 32)


@pytest.mark.parametrize(
    ("changes", "name", "value", "allowed"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, "model_type", "'mistral'", "llama"),
        ({"model_type": "gemma3_text"}, "model_type", "'gemma3_text'", "qwen2"),
        ({"model_type": "qwen3_moe"}, "model_type", "'qwen3_moe'", "qwen3"),
        ({"model_type": None}, "model_type", "None", "llama"),
        ({"model_type": ["llama"]}, "model_type", "['llama']", "llama"),
        ({"hidden_act": "gelu"}, "hidden_act", "'gelu'", "silu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type", "'yarn'", "llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type", "'linear'", "llama3"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor", "0.5", "1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5", "1.0"),
        ({"rope_scaling": "linear"}, "rope_parameters", "'linear'", "object"),
        ({"use_sliding_window": True, "sliding_window": 8}, "sliding_window", "8", "null"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "sliding", "full_attention"),
        ({"attention_bias": True}, "attention_bias", "True", "qwen2"),
        ({"mlp_bias": True}, "mlp_bias", "True", "false"),
        ({"hidden_size": "48"}, "hidden_size", "'48'", ">= 1"),
        ({"num_key_value_heads": 3}, "num_heads", "4", "num_kv_heads=3"),
        ({"rope_theta": "big"}, "rope_theta", "'big'", "number"),
        ({"rms_norm_eps": float("nan")}, "norm_eps", "nan", "(0, 1)"),
    ],
)
def test_unsupported_models_are_refused_by_name_value_and_allowed_range(changes, name, value, allowed):
    with pytest.raises(ValueError) as raised:
        DecoderConfig.from_hf(QWEN3 | changes)
    message = str(raised.value)
    assert message.startswith(f"{name}=")
    assert value in message
    assert allowed in message
    assert "\n" not in message


def test_llama_with_a_window_is_refused():
    with pytest.raises(ValueError, match="sliding_window=8"):
        DecoderConfig.from_hf(LLAMA | {"sliding_window": 8})


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers", "rms_norm_eps", "rope_theta"])
def test_a_missing_field_is_named(name):
    with pytest.raises(ValueError, match=f"no '{name}'"):
        DecoderConfig.from_hf({key: value for key, value in QWEN3.items() if key != name})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 15}, "head_dim=15.*even"),
        ({"num_layers": 0}, "num_layers=0.*>= 1"),
        ({"vocab_size": True}, "vocab_size=True.*integer"),
        ({"rope_theta": float("inf")}, "rope_theta=inf.*finite"),
        ({"max_length": -1}, "max_length=-1.*>= 1"),
    ],
)
def test_impossible_values_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(DecoderConfig.from_hf(QWEN3), **changes)


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
