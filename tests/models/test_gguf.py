import dataclasses
import functools

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from models.gguf import gguf_name, read_gguf, unpermute
from models.huggingface import hub_name, read_folder
from models.load import load
from models.tokenizer import Tokenizer
from models.weights import parameter_names

NUM_PARAMETERS = 134_515_008  # of SmolLM2-135M, as its model card states


@pytest.fixture
def llama(folder_copy):
    folder = folder_copy("tiny_llama")
    return read_folder(folder), load_file(folder / "model.safetensors")


@pytest.fixture
def metadata(bpe_parts):
    tokens, merges, control = bpe_parts
    return {
        "llama.vocab_size": 512,
        "llama.context_length": 256,
        "llama.embedding_length": 48,
        "llama.block_count": 3,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 16,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.freq_base": 500000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in control else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


@pytest.fixture
def tensors(llama):
    decoder, stored = llama
    tensors = {}
    for name in parameter_names(decoder.config):
        tensor = stored[hub_name(name, decoder.config)].astype(np.float32)
        leaf = name.rpartition(".")[2]
        if leaf in ("query", "key"):
            tensor = interleave(tensor, num_heads=4 if leaf == "query" else 2)
        tensors[gguf_name(name)] = tensor
    return tensors


def interleave(weight, num_heads):
    """Row by row: half-layout row i of a head goes to 2 i, row i + half to 2 i + 1."""
    head_dim = len(weight) // num_heads
    out = np.empty_like(weight)
    for head in range(num_heads):
        for pair in range(head_dim // 2):
            first = head * head_dim
            out[first + 2 * pair] = weight[first + pair]
            out[first + 2 * pair + 1] = weight[first + head_dim // 2 + pair]
    return out


@pytest.fixture
def write(tmp_path, metadata, tensors):
    """Write the tiny llama as GGUF with some metadata or tensors changed; None leaves one out."""

    def write(metadata_changes=(), tensor_changes=(), architecture="llama", quantise=None):
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        for name, value in (metadata | dict(metadata_changes)).items():
            add_metadata(writer, name, value)
        for name, tensor in (tensors | dict(tensor_changes)).items():
            if tensor is not None:
                add_tensor(writer, name, tensor, quantise)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def add_metadata(writer, name, value):
    if isinstance(value, list):
        writer.add_array(name, value)
    elif value is not None:
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](name, value)


def add_tensor(writer, name, tensor, quantise):
    if quantise is None or tensor.shape[-1] % 32:
        writer.add_tensor(name, tensor)
    else:
        writer.add_tensor(name, gguf.quantize(tensor, quantise), raw_dtype=quantise)


def test_the_file_holds_the_same_decoder_as_the_hub_folder(write, llama):
    decoder, tokenizer = read_gguf(write())
    eps = float(np.float32(1e-6))  # the file holds float32
    assert decoder.config == dataclasses.replace(llama[0].config, norm_eps=eps)
    for one, other in zip(jax.tree.leaves(decoder), jax.tree.leaves(llama[0]), strict=True):
        np.testing.assert_array_equal(one, other)
    assert [tokenizer.decode([token_id]) for token_id in tokenizer.encode("he 12")] == ["he", " ", "1", "2"]
    assert (tokenizer.eos_token_ids, tokenizer.pad_token_id) == ((2,), 2)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]) == "Hi"


def test_quantised_tensors_are_expanded(write, llama):
    decoder, _ = read_gguf(write(quantise=gguf.GGMLQuantizationType.Q8_0), jnp.bfloat16)
    found, expected = decoder.layers[1].down[...], llama[0].layers[1].down[...]
    assert found.dtype == jnp.bfloat16
    # Q8_0 rounds to 1/254 of a block's maximum, bfloat16 to 8 bits.
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=0, atol=np.abs(expected).max() / 100)


def test_a_file_without_a_head_is_tied(write):
    decoder, _ = read_gguf(write(tensor_changes={"output.weight": None}))
    assert decoder.config.tie_embeddings
    assert decoder.head is decoder.embedding[...]


def test_unpermute_by_hand():
    rows = np.arange(8)[:, None]
    assert unpermute(rows, num_heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.block_count": None}, "metadata field 'llama.block_count' is missing"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type='yarn' is not supported, allowed: ('none',)"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count=8 is not supported, allowed: (16,)"),
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
        ({"rope_freqs.weight": np.ones(8, np.float32)}, "belong to no parameter, the first is 'rope_freqs.weight'"),
    ],
)
def test_wrong_tensors_are_refused(write, changes, message):
    assert message in refusal(write(tensor_changes=changes))


def test_another_architecture_is_refused(write):
    message = refusal(write(architecture="gemma3"))
    assert "general.architecture='gemma3' is not supported, allowed: ('llama',)" in message


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, 100_000])
def test_a_truncated_file_is_refused(write, keep):
    path = write()
    path.write_bytes(path.read_bytes()[:keep])
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
    cache = jax.jit(lambda decoder, *prompts: decoder.prefill(*prompts, capacity=capacity))(decoder, row, lengths)
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
