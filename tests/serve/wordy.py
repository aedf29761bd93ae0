"""A tokenizer of some hundred words and a model that writes given ones after given prompts, for tests over HTTP."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from engine_models import PIECES, Known, Words
from mock_model import NUM_STATES

SPLIT = (b"\xc4", b"\x8f")
EXTRA = ("DEFG", "X", "Paris", "...", "The quick br", "own fox", "own dog", *SPLIT)
WORDS = (*PIECES, *EXTRA)
VOCAB_SIZE = 256
VOCABULARY = (*WORDS, *(f"[{number}]" for number in range(VOCAB_SIZE - len(WORDS))))


class Vocabulary(Words):
    """`Words` that say which text they cannot write."""

    def encode(self, text, add_special_tokens=False):
        token_ids = [1] if add_special_tokens else []
        while text:
            fitting = [piece for piece in self._pieces if isinstance(piece, str) and text.startswith(piece)]
            if not fitting:
                raise ValueError(f"no token begins {text!r:.40}")
            piece = max(fitting, key=len)
            token_ids.append(self._pieces.index(piece))
            text = text[len(piece) :]
        return token_ids


TOKENIZER = Vocabulary(*VOCABULARY)


def ids_of(*pieces):
    return [VOCABULARY.index(piece) for piece in pieces]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scored(Known):
    """A `Known` that also reads whole rows on the device."""

    def logits(self, token_ids, lengths=None):
        if lengths is None:
            return super().logits(token_ids)

        def read(state, column):
            state = (state * 31 + column + 7) % self.table.shape[0]
            return state, state

        _, states = jax.lax.scan(read, jnp.zeros_like(token_ids[:, 0]), token_ids.T)
        return self.table[states.T]


# What the model writes after a prompt of one id, and after that EOS.
SCRIPTS = {
    "a": ["DEF", "G", "HI", "J"],
    "b": ["DEF", "G", "X"],
    "c": ["The quick br", "own fox"],
    "d": ["The quick br", "own dog"],
    "e": ["Paris"],
    "f": ["..."],
    "g": [*SPLIT],
    "h": ["a", *SPLIT, "b"],
}
# After this prompt all ids are equally likely.
FLAT = "i"


def wordy_model():
    table = np.random.default_rng(3).normal(size=(NUM_STATES, VOCAB_SIZE)).astype(np.float32) * 2
    walker = Scored(jnp.asarray(table))
    for prompt, pieces in SCRIPTS.items():
        prefix = ids_of(prompt)
        for token_id in [*ids_of(*pieces), 2]:
            row = table[walker.state_after(prefix)]
            row[:], row[token_id] = -30, 30
            prefix.append(token_id)
    table[walker.state_after(ids_of(FLAT))] = 0
    return Scored(jnp.asarray(table))


MODEL = wordy_model()
# Shapes grow to hold it, and what is compiled for it serves all that asks for less.
WIDEST = {
    "prompt": [3, 4, 5],
    "n": 4,
    "top_k": VOCAB_SIZE,
    "logprobs": 5,
    "min_tokens": 2,
    "stop_token_ids": list(range(50, 251)),
    "allowed_token_ids": list(range(8)),
    "logit_bias": {str(token_id): 1 for token_id in range(8)},
    "bad_words": [[5, 6], [7]],
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
}
ENDPOINTS = {
    "generate": "/inference/v1/generate",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}
PROMPT = "the cab"
MESSAGES = [{"role": "user", "content": PROMPT}]
_OUTER = ("stream", "request_id", "model", "timeout", "return_token_ids", "output_mode", "token_ids", "unknown")


def body_of(endpoint, **fields):
    """A body for one of ENDPOINTS that asks for a few tokens with their supports; fields change it."""
    fields = {"top_k": 7, "max_tokens": 6, "seed": 3, **fields}
    if endpoint == "generate":
        outer = {name: fields.pop(name) for name in _OUTER if name in fields}
        prompt = TOKENIZER.encode(PROMPT, add_special_tokens=True)
        return {"token_ids": prompt, "return_token_ids": True, "output_mode": "text", "sampling_params": fields} | outer
    if endpoint == "chat":
        fields = {"messages": MESSAGES} | fields
        if "logprobs" in fields:
            fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    else:
        fields = {"prompt": PROMPT} | fields
    return {"return_token_ids": True, **fields}


def text_of(choice):
    """The text of a choice of any endpoint, whole or a piece of it."""
    for said in ("message", "delta"):
        if said in choice:
            return choice[said].get("content", "")
    return choice["text"]
