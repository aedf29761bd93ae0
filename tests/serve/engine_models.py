"""A model whose logits are known for every prefix, a tokenizer for it, and completions checked token by token."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances
from mock_model import NUM_STATES, Mock, V
from stub_text import Pieces

from jaxmask import SamplingParams
from serve.compilation import compiled_so_far
from serve.config import EngineConfig
from serve.engine import Engine

EOS = 2
SPECIAL, LETTERS = ("<|pad|>", "<|bos|>", "<|eos|>"), "abcdefghijklmnopqrstuvwxyz"
PIECES = (*SPECIAL, *LETTERS, " ", "th", "e ", "DEF", "G", "HI", "J", *"?!:;")
assert len(PIECES) == V


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Known(Mock):
    """A `Mock` that says how many ids it has."""

    @property
    def vocab_size(self):
        return self.table.shape[1]


def known_model(seed=0, scale=2.0, max_length=64):
    table = np.random.default_rng(seed).normal(size=(NUM_STATES, V)) * scale
    return Known(jnp.asarray(table, jnp.float32), max_length)


class Words(Pieces):
    """Encodes by the longest piece, and has the names that an `LLM` asks for."""

    eos_token_ids = (EOS,)
    generation_defaults: ClassVar = {"temperature": 0.5, "top_k": 7, "max_new_tokens": 5, "eos_token_id": EOS}

    def encode(self, text, add_special_tokens=False):
        token_ids = [1] if add_special_tokens else []
        while text:
            piece = max((piece for piece in self._pieces if text.startswith(piece)), key=len)
            token_ids.append(self._pieces.index(piece))
            text = text[len(piece) :]
        return token_ids

    def apply_chat_template(self, messages, add_generation_prompt=True, **values):
        turns = "".join(f"{message['role'][:1]}:{message['content']};" for message in messages)
        return "<|bos|>" + turns + ("a:" if add_generation_prompt else "") + "".join(sorted(values))


WORDS = Words(*PIECES)


class Programs:
    """Counts what is compiled inside of a `with`."""

    def __enter__(self):
        self._before = compiled_so_far()
        return self

    def __exit__(self, *_):
        self.count = (compiled_so_far() - self._before).num_programs


def assert_truthful(output, params, model, has_logprobs=True):
    """Each token of an answer against the model's logits after the same prefix, in float64."""
    prompt = output.prompt_token_ids
    for completion in output.outputs:
        masks, logprobs = completion.sampling_mask, completion.logprobs
        for step, token in enumerate(completion.token_ids):
            before = completion.token_ids[:step]
            edited = oracle.edit(model.logits(prompt + before), params, prompt=prompt, output=before, eos=(EOS,))
            truth = oracle.truth(edited[None], [params])
            assert truth.is_exact.all()
            keep = truth.keep()
            assert keep[0, token]
            if masks is not None:
                assert masks[step] == np.flatnonzero(keep[0]).tolist()
            if has_logprobs:
                values = oracle.log_probs(truth.z, keep)[0]
                for entry_id, entry in logprobs[step].items():
                    assert entry.logprob == pytest.approx(values[entry_id], abs=tolerances.LOGPROB)
                    assert entry.rank == (values >= values[entry_id]).sum()


MODEL = known_model()
SETTINGS = {"return_sampling_mask": True, "logprobs_mode": "processed_logprobs", "max_num_seqs": 4, "max_logprobs": 5}
# One shape for all calls.
SHAPE = {"min_num_seqs": 4, "min_model_len": 64, "steps_per_chunk": 8}
MASKED = SamplingParams(temperature=0.9, top_k=12, top_p=0.95, min_p=0.01, max_tokens=9, logprobs=3)
random = np.random.default_rng(0)
PROMPTS = [random.integers(3, V, size).tolist() for size in random.integers(1, 14, 11)]


def changed(**changes):
    return dataclasses.replace(MASKED, **changes)


# One of each kind, so that all further calls find their programs compiled.
MIXED = [
    changed(seed=0, temperature=1.3),
    changed(seed=1, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2),
    changed(seed=2, max_tokens=3, top_k=2),
    changed(seed=3, bad_words=[[5, 6], [7]], min_tokens=4),
    changed(seed=4, logit_bias={5: 3.0, 6: -100}, max_tokens=14),
    changed(seed=5, allowed_token_ids=[4, 5, 6, 7, 8], logprobs=0),
    changed(seed=6, stop_token_ids=[9, 10, 11, 12], ignore_eos=True),
    changed(seed=7, top_p=1.0, top_k=1),
    changed(seed=8, bad_words=["the", "ab"], max_tokens=12),
    changed(seed=9, min_tokens=9),
    changed(seed=10, repetition_penalty=0.7, max_tokens=1),
]


def warm(engine):
    """Compiles what all further calls of this shape need."""
    prompts, params = [*PROMPTS, [3] * 17], [*MIXED, MASKED]
    for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(f"warm {number}", prompt, one)
    while engine.has_unfinished_requests():
        engine.step()


def same(output):
    fields = ("index", "text", "token_ids", "sampling_mask", "finish_reason", "stop_reason")
    return [tuple(getattr(completion, field) for field in fields) for completion in output.outputs]


@functools.cache
def _lone_engine():
    engine = Engine(MODEL, WORDS, EngineConfig(**SETTINGS, **SHAPE))
    warm(engine)
    return engine


def answer_alone(prompt, settings):
    """What an engine answers to one request, given by the fields of its settings, when it has no other."""
    engine, outputs = _lone_engine(), []
    engine.add_request("alone", prompt, SamplingParams(**settings))
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs
