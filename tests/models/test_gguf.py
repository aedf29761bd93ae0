import dataclasses
import functools
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_files import ARCHITECTURES, decoder_metadata, decoder_tensors, write_gguf

from models import gguf_config, gguf_file
from models.config import LinearRopeScaling, Llama3RopeScaling
from models.gguf import read_decoder, read_gguf
from models.gguf_config import rope_factors
from models.gguf_file import GGUFFile, GGUFTensor, unpermute
from models.huggingface import read_config, read_folder
from models.load import load
from models.sharding import MeshRules, make_mesh
from models.tokenizer import Tokenizer

NUM_PARAMETERS = 134_515_008  # of SmolLM2-135M, as its model card states
KINDS = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def folders():
    return Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def llama(folders):
    return read_folder(folders / "tiny_llama")


@pytest.fixture
def tokenizer_metadata(bpe_parts):
    tokens, merges, control = bpe_parts
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in control else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


@pytest.fixture
def write(tmp_path, folders, tokenizer_metadata):
    """Write a stored checkpoint as GGUF with some metadata or tensors changed; None leaves one out."""

    def write(metadata_changes=(), tensor_changes=(), name="tiny_llama", architecture=None, quantise=None):
        config, own = read_config(folders / name), ARCHITECTURES[name]
        metadata = decoder_metadata(config, own) | tokenizer_metadata | dict(metadata_changes)
        tensors = decoder_tensors(folders / name, own) | dict(tensor_changes)
        return write_gguf(tmp_path / f"{name}.gguf", architecture or own, metadata, tensors, quantise)

    return write


def assert_same_trees(one, other):
    for leaf, expected in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(leaf, expected)


def test_the_file_holds_the_same_decoder_and_its_tokenizer(write, llama):
    decoder, tokenizer = read_gguf(write())
    eps = float(np.float32(1e-6))  # the file holds float32
    assert decoder.config == dataclasses.replace(llama.config, norm_eps=eps)
    assert_same_trees(decoder, llama)
    assert [tokenizer.decode([token_id]) for token_id in tokenizer.encode("he 12")] == ["he", " ", "1", "2"]
    assert (tokenizer.eos_token_ids, tokenizer.pad_token_id) == ((2,), 2)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]) == "Hi"


@pytest.mark.parametrize("name", ["tiny_qwen2", "tiny_qwen3", "tiny_gemma3"])
def test_other_architectures_hold_the_same_decoder(write, folders, name):
    decoder, expected = read_decoder(GGUFFile(write(name=name))), read_folder(folders / name)
    config = dataclasses.replace(expected.config, norm_eps=float(np.float32(1e-6)))
    if name == "tiny_gemma3":  # its scalar of the queries is not its head size, and no field could say so
        config = dataclasses.replace(config, attention_scale=config.head_dim**-0.5)
    assert decoder.config == config
    for (path, leaf), other in zip(
        jax.tree_util.tree_leaves_with_path(decoder), jax.tree.leaves(expected), strict=True
    ):
        # 1 + w rounds before it is stored.
        is_stored_plus_one = name == "tiny_gemma3" and "norm" in str(path)
        np.testing.assert_allclose(leaf, other, rtol=0, atol=2.0**-24 if is_stored_plus_one else 0)


def test_gemma_takes_its_defaults_and_27b_its_own_scale(write):
    left_out = {"gemma3.attention.sliding_window_pattern": None, "gemma3.vocab_size": None}
    config = read_config_of(write(left_out, name="tiny_gemma3"))
    assert (config.full_layers, config.local_rope_theta, config.vocab_size) == ((), 1e4, 512)
    assert config.rope_scaling is None
    large = {"gemma3.block_count": 62, "gemma3.embedding_length": 5376, "gemma3.attention.head_count": 32}
    changes = left_out | large | {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    config = read_config_of(write(changes, name="tiny_gemma3"))
    assert config.full_layers == (5, 11, 17, 23, 29, 35, 41, 47, 53, 59)
    assert config.attention_scale == 168**-0.5
    assert (config.theta_of(0), config.theta_of(5)) == ((1e4, None), (1e6, LinearRopeScaling(8.0)))


def read_config_of(path):
    return gguf_config.read_config(GGUFFile(path))


def test_soft_caps_are_read(write):
    changes = {"gemma3.attn_logit_softcapping": 50.0, "gemma3.final_logit_softcapping": 30.0}
    config = read_config_of(write(changes, name="tiny_gemma3"))
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_wavelengths_are_recognised(write, factor):
    scaling = Llama3RopeScaling(factor, 1.0, 4.0, 8192)
    factors = rope_factors(16, 500000.0, scaling)
    assert factors[0] == 1.0
    assert factors[-1] == pytest.approx(factor)
    decoder = read_decoder(GGUFFile(write(tensor_changes={"rope_freqs.weight": factors})))
    assert decoder.config.rope_scaling == scaling


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_every_kind_of_tensor_is_expanded(write, llama, kind):
    found = read_decoder(GGUFFile(write(quantise=KINDS[kind])), jnp.bfloat16).layers[1].down[...]
    assert found.dtype == jnp.bfloat16
    expected = llama.layers[1].down[...]
    # Q4 rounds to 1/16 of a block's maximum, Q8 and bfloat16 to less than 1/200.
    tolerance = {"4": 8, "5": 16}.get(kind[1], 100)
    error = np.abs(found.astype(jnp.float32) - expected).max()
    assert error <= np.abs(expected).max() / tolerance
    assert (error > 0) == kind.startswith("Q")


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_a_piece_of_quantised_rows_is_that_of_the_whole(kind, monkeypatch):
    monkeypatch.setattr(gguf_file, "ROWS_AT_ONCE", 3)
    # Bytes, as gguf cannot quantise to these kinds; below 60, so that the scales among them are finite.
    stored = np.random.default_rng(0).integers(0, 60, (8, 2 * gguf.GGML_QUANT_SIZES[KINDS[kind]][1]), np.uint8)
    whole = gguf.dequantize(stored, KINDS[kind])
    assert whole.shape == (8, 512)
    tensor = GGUFTensor(Path("a.gguf"), "blk.0.attn_q.weight", KINDS[kind], stored)
    piece = (slice(4, 8), slice(100, 300))
    np.testing.assert_array_equal(tensor[piece], whole[piece])
    np.testing.assert_array_equal(tensor.unpermuted(2)[piece], whole[[4, 6, 5, 7], 100:300])


def test_a_mesh_gets_pieces_of_the_same_weights(write, llama):
    path = write(quantise=KINDS.Q8_0)
    decoder = read_decoder(GGUFFile(path), rules=MeshRules(make_mesh(data=2, fsdp=2, tensor=2)))
    assert decoder.layers[1].query[...].addressable_shards[0].data.shape == (32, 24)
    assert_same_trees(decoder, read_decoder(GGUFFile(path)))


def test_a_file_without_a_head_is_tied(write):
    decoder = read_decoder(GGUFFile(write(tensor_changes={"output.weight": None})))
    assert decoder.config.tie_embeddings
    assert decoder.head is decoder.embedding[...]


def test_unpermute_by_hand():
    rows = np.arange(8)[:, None]
    assert unpermute(rows, num_heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.block_count": None}, "metadata field 'llama.block_count' is missing"),
        (
            {"llama.rope.scaling.type": "yarn"},
            "llama.rope.scaling.type='yarn' is not supported, allowed: ('none', 'linear')",
        ),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count=8 is not supported, allowed: (16,)"),
        (
            {"llama.attention.head_count": [4, 4]},
            "llama.attention.head_count=[4, 4] is not supported, allowed: one number",
        ),
        ({"llama.block_count": 3.5}, "llama.block_count=3.5 is not supported, allowed: an integer"),
        ({"llama.attention.head_count": 0}, "num_heads=0 is not supported, allowed: an integer >= 1"),
        ({"llama.attention.sliding_window": 8}, "llama.attention.sliding_window=8 is not supported, allowed: (0,)"),
        ({"llama.expert_count": 8}, "llama.expert_count=8 is not supported, allowed: (0,)"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model='bert' is not supported, allowed: ('gpt2', 'llama')"),
    ],
)
def test_unsupported_metadata_is_refused(write, changes, message):
    assert message in refusal(write(changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blk.1.ffn_up.weight": None}, "tensor 'blk.1.ffn_up.weight' with shape (96, 48) is missing"),
        ({"output_norm.weight": np.ones(47, np.float32)}, "'output_norm.weight' must have shape (48,), it has (47,)"),
        ({"rope_freqs.weight": np.ones(8, np.float32)}, "tensor 'rope_freqs.weight' is not that of one of (Llama3Rope"),
        ({"blk.0.attn_q.bias": np.ones(64, np.float32)}, "belong to no parameter, the first is 'blk.0.attn_q.bias'"),
        ({"token_embd.weight": None}, "tensor 'token_embd.weight' is missing"),
    ],
)
def test_wrong_tensors_are_refused(write, changes, message):
    assert message in refusal(write(tensor_changes=changes))


def test_another_architecture_is_refused(write):
    message = refusal(write(architecture="mamba"))
    assert "general.architecture='mamba' is not supported, allowed: ('llama', 'qwen2', 'qwen3', 'gemma3')" in message


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (99, "holds a tensor of type 99, which gguf does not know"),
        (int(KINDS.I32), "tensor 'output_norm.weight' has type I32, which gguf cannot expand"),
    ],
)
def test_an_unknown_kind_of_tensor_is_refused(write, kind, message):
    path, name = write(), b"output_norm.weight"
    content = bytearray(path.read_bytes())
    # After the name: the number of axes, one length, the kind.
    place = content.index(name) + len(name) + 4 + 8
    content[place : place + 4] = kind.to_bytes(4, "little")
    path.write_bytes(content)
    assert message in refusal(path)


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, 100_000])
def test_a_truncated_file_is_refused(write, keep):
    path = write()
    path.write_bytes(path.read_bytes()[:keep])
    assert "is not a whole GGUF file" in refusal(path)


def test_a_file_without_its_last_tensor_is_refused(write):
    path = write()
    path.write_bytes(path.read_bytes()[:-64])
    assert "is not a whole GGUF file" in refusal(path)


def refusal(path):
    with pytest.raises(ValueError) as raised:
        read_gguf(path)
    message = str(raised.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


@pytest.mark.slow
def test_smollm2_answers_and_its_tokenizer_splits_digits(smollm2):
    decoder, tokenizer = load(smollm2)
    assert sum(leaf.size for leaf in jax.tree.leaves(decoder)) == NUM_PARAMETERS
    assert answer(decoder, tokenizer, "The capital of France is").startswith(" Paris")
    question = {"role": "user", "content": "What is 7 plus 5? Answer with the number only."}
    assert "12" in answer(decoder, tokenizer, tokenizer.apply_chat_template([question]))
    check_smollm2_tokenizer(tokenizer)


@functools.partial(jax.jit, static_argnums=3)
def read(decoder, prompt_ids, lengths, capacity):
    return decoder.prefill(prompt_ids, lengths, capacity=capacity)


@functools.partial(jax.jit, static_argnums=3)
def draw_greedily(decoder, last_ids, cache, num_tokens):
    def step(state, _):
        logits, cache = decoder.decode(*state)
        token_ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return (token_ids, cache), token_ids

    return jax.lax.scan(step, (last_ids, cache), length=num_tokens)[1]


def answer(decoder, tokenizer: Tokenizer, prompt, num_tokens=12, capacity=64):
    """Greedy continuation, cut at the first end of reply."""
    prompt_ids = tokenizer.encode(prompt)
    row = jnp.asarray([prompt_ids + [0] * (capacity - num_tokens - len(prompt_ids))])

    last_ids, lengths = jnp.asarray(prompt_ids[-1:]), jnp.asarray([len(prompt_ids) - 1])
    cache = read(decoder, row, lengths, capacity)
    drawn = draw_greedily(decoder, last_ids, cache, num_tokens)[:, 0].tolist()
    ends = [drawn.index(token_id) for token_id in tokenizer.eos_token_ids if token_id in drawn]
    return tokenizer.decode(drawn[: min(ends, default=num_tokens)])


def check_smollm2_tokenizer(tokenizer):
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids, tokenizer.pad_token_id) == (49152, (2,), 2)
    for text in ("Hello  world 1234, 日本 🎉\n\n\ttabs  ", "it's 3.14159", "x=12+7;\nfor i in range(10):", "ünïcødé"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    pieces = [tokenizer.decode([token_id]) for token_id in tokenizer.encode("a2024 and 12")]
    assert pieces == ["a", "2", "0", "2", "4", " and", " ", "1", "2"]
    assert tokenizer.encode("<|im_start|>user<|im_end|>") == [1, *tokenizer.encode("user"), 2]
