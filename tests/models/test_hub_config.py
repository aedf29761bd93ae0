import json

import pytest

from models.config import DecoderConfig, LinearRopeScaling, Llama3RopeScaling
from models.hub_config import from_hub

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
    assert from_hub(new) == from_hub(old)


def test_qwen3_values_are_read_field_by_field():
    assert from_hub(QWEN3) == DecoderConfig(
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
    config = from_hub(hub | {"head_dim": None, "rope_scaling": None, "sliding_window": None})
    assert (config.num_kv_heads, config.head_dim, config.tie_embeddings) == (4, 12, False)


def test_qwen2_has_biases_and_an_unused_window_is_no_obstacle():
    config = from_hub(QWEN3 | {"model_type": "qwen2", "sliding_window": 32768, "use_sliding_window": False})
    assert (config.attention_bias, config.qk_norm) == (True, False)


def test_llama3_scaling_is_read_in_the_old_spelling_too():
    scaling = {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    assert from_hub(LLAMA | {"rope_scaling": scaling}).rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 32)


@pytest.mark.parametrize(
    ("changes", "name", "value", "allowed"),
    [
        ({"model_type": "gemma3"}, "model_type", "'gemma3'", "gemma3_text"),
        ({"model_type": "qwen3_moe"}, "model_type", "'qwen3_moe'", "qwen3"),
        ({"model_type": None}, "model_type", "None", "llama"),
        ({"model_type": ["llama"]}, "model_type", "['llama']", "llama"),
        ({"hidden_act": "gelu"}, "hidden_act", "'gelu'", "silu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type", "'yarn'", "llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor", "0.5", ">= 1"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor", "0.5", "1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5", "1.0"),
        ({"rope_scaling": "linear"}, "rope_parameters", "'linear'", "object"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "sliding", "each of 3 layers"),
        ({"layer_types": ["full_attention"] * 2 + ["chunked_attention"]}, "layer_types", "chunked", "full_attention"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window", "None", "a number"),
        ({"use_sliding_window": True, "sliding_window": -8, "max_window_layers": 0}, "sliding_window", "-8", ">= 1"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional", "True", "false"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters", "1000", "one object"),
        ({"attention_bias": True}, "attention_bias", "True", "qwen2"),
        ({"mlp_bias": True}, "mlp_bias", "True", "false"),
        ({"hidden_size": "48"}, "hidden_size", "'48'", ">= 1"),
        ({"num_key_value_heads": 3}, "num_heads", "4", "num_kv_heads=3"),
        ({"rope_theta": "big"}, "rope_theta", "'big'", "number"),
        ({"rope_theta": 10**400}, "rope_theta", "'1000", "a float can hold"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers", "1000000000000", "at most 1000"),
        ({"rms_norm_eps": float("nan")}, "norm_eps", "nan", "(0, 1)"),
    ],
)
def test_unsupported_models_are_refused_by_name_value_and_allowed_range(changes, name, value, allowed):
    with pytest.raises(ValueError) as raised:
        from_hub(QWEN3 | changes)
    message = str(raised.value)
    assert message.startswith(name)
    assert value in message
    assert allowed in message
    assert "\n" not in message


def test_gemma3_takes_its_defaults_and_the_pattern_of_its_windows():
    config = from_hub({name: QWEN3[name] for name in SHAPE} | {"model_type": "gemma3_text", "num_hidden_layers": 12})
    assert config.full_layers == (5, 11)
    assert (config.sliding_window, config.local_rope_theta, config.rope_theta) == (4096, 1e4, 1e6)
    assert (config.head_dim, config.attention_scale, config.tie_embeddings) == (256, 1 / 16, True)
    assert (config.activation, config.norm_plus_one, config.post_norms, config.scale_embedding) == (
        "gelu_tanh",
        True,
        True,
        True,
    )


SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def test_gemma3_stretches_the_wavelengths_of_full_layers_alone():
    scaling = {"factor": 8.0, "rope_type": "linear"}
    gemma = QWEN3 | {"model_type": "gemma3_text", "hidden_act": None, "num_hidden_layers": 6, "rope_scaling": scaling}
    config = from_hub(gemma)
    assert config.theta_of(5) == (1e6, LinearRopeScaling(8.0))
    assert config.theta_of(0) == (1e4, None)


def test_mistral_windows_hold_for_every_layer_and_null_means_none():
    mistral = LLAMA | {"model_type": "mistral"}
    assert [from_hub(mistral | {"sliding_window": 8}).window_of(layer) for layer in range(3)] == [8, 8, 8]
    assert from_hub(mistral).sliding_window == 4096
    assert from_hub(mistral | {"sliding_window": None}).sliding_window is None


def test_qwen_windows_begin_at_a_layer():
    config = from_hub(QWEN3 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2})
    assert [config.window_of(layer) for layer in range(3)] == [None, None, 8]


def test_smollm3_layers_without_rotation():
    smollm3 = QWEN3 | {"model_type": "smollm3", "num_hidden_layers": 8}
    assert from_hub(smollm3).unrotated_layers == (3, 7)
    listed = from_hub(smollm3 | {"no_rope_layers": [0, 1, 1, 1, 1, 1, 1, 0]})
    assert listed.unrotated_layers == (0, 7)
    assert listed.theta_of(0) is None
    assert listed.sliding_window is None


def test_llama_with_a_window_is_refused():
    with pytest.raises(ValueError, match="sliding_window=8"):
        from_hub(LLAMA | {"sliding_window": 8})


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers", "rms_norm_eps", "rope_theta"])
def test_a_missing_field_is_named(name):
    with pytest.raises(ValueError, match=f"no '{name}'"):
        from_hub({key: value for key, value in QWEN3.items() if key != name})


WRONG = ("x", "", [], [1], ["a"], [None], {}, {"a": 1}, -1, 0, 1.5, True, float("nan"), {"full_attention": 3})
FIELDS = ("no_rope_layers", "layer_types", "max_window_layers", "rope_scaling", "rope_parameters", "sliding_window")


def test_values_of_a_wrong_type_are_refused_in_one_line_or_mean_something(stored_folder):
    hub = json.loads((stored_folder / "config.json").read_text()) | {"use_sliding_window": True}
    rope = hub["rope_parameters"]
    changed = [{name: value} for name in {*hub, *FIELDS} for value in WRONG]
    changed += [{"rope_parameters": rope | {name: value}} for name in rope for value in WRONG]
    messages = [message for change in changed if (message := refusal(hub | change)) is not None]
    assert len(messages) > 100
    assert not any("\n" in message for message in messages)


def refusal(hub):
    try:
        hash(from_hub(hub))
    except ValueError as error:
        return str(error)
    return None
