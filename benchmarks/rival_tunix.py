"""Tunix's own sampler (`tunix.generate.sampler`) on its Qwen3.

It gives up two things: it returns no supports, and its log-probabilities are over the whole vocabulary, not over what
the token was drawn from.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from generate_case import Case
from tunix.generate import sampler
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.models.qwen3.params import create_model_from_safe_tensors


class Tokenizer:
    """Ids as text, since Tunix takes strings; no id is its end or its padding."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: list[int]) -> str:
        return ""

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return self.vocab_size

    def pad_id(self) -> int:
        return self.vocab_size


def load_model(folder: str) -> Qwen3:
    hub = json.loads((Path(folder) / "config.json").read_text())
    config = ModelConfig(
        num_layers=hub["num_hidden_layers"],
        vocab_size=hub["vocab_size"],
        embed_dim=hub["hidden_size"],
        hidden_dim=hub["intermediate_size"],
        num_heads=hub["num_attention_heads"],
        head_dim=hub["head_dim"],
        num_kv_heads=hub["num_key_value_heads"],
        rope_theta=hub["rope_theta"],
        norm_eps=hub["rms_norm_eps"],
        use_tied_embedding=hub["tie_word_embeddings"],
    )
    return create_model_from_safe_tensors(folder, config, dtype=jnp.float32)


def token_logprobs(model: Qwen3, token_ids: list[int]) -> list[float]:
    length = len(token_ids)
    mask = jnp.tril(jnp.ones((1, length, length), jnp.bool_))
    logits, _ = model(jnp.asarray([token_ids]), jnp.arange(length)[None], None, mask)
    logprobs = np.asarray(jax.nn.log_softmax(logits[0, :-1]))
    return logprobs[np.arange(length - 1), token_ids[1:]].tolist()


class Rival:
    def __init__(self, folder: str, max_length: int):
        self.model = load_model(folder)
        config = self.model.config
        cache = sampler.CacheConfig(max_length, config.num_layers, config.num_kv_heads, config.head_dim)
        self.sampler = sampler.Sampler(self.model, Tokenizer(config.vocab_size), cache)

    def run(self, case: Case) -> dict[str, list]:
        found = self.sampler(
            [" ".join(map(str, ids)) for ids in case.prompts],
            max_generation_steps=case.max_new_tokens,
            max_prompt_length=case.prompt_length,
            temperature=case.temperature,
            top_k=case.top_k,
            top_p=case.top_p,
            seed=0,
            return_logprobs=True,
        )
        return {"token_ids": [ids.tolist() for ids in found.tokens], "logprobs": found.logprobs}

    def token_logprobs(self, token_ids: list[int]) -> list[float]:
        return token_logprobs(self.model, token_ids)
