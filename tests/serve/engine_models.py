"""A model whose logits are known for every prefix, a tokenizer for it, and completions checked token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances
from stub_text import Pieces
from test_generate import NUM_STATES, Mock, V

from serve.compilation import compiled_so_far

EOS = 2
PIECES = ["<|pad|>", "<|bos|>", "<|eos|>", *"abcdefghijklmnopqrstuvwxyz", " ", "th", "e ", "DEF", "G", "HI", "J", *"?!:;"]
assert len(PIECES) == V


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Known(Mock):
    """A `Mock` that says how many ids it has, and reads whole rows."""

    @property
    def vocab_size(self):
        return self.table.shape[1]

    def logits(self, token_ids, lengths=None):
        states = [jnp.zeros(token_ids.shape[0], jnp.int32)]
        for column in range(token_ids.shape[1]):
            states.append(self._next(states[-1], token_ids[:, column]))
        return self.table[jnp.stack(states[1:], axis=1)]

    def logits_after(self, prefix):
        """On the host."""
        return np.asarray(self.table)[self.state_after(prefix)]


def known_model(seed=0, scale=2.0, max_length=64):
    table = np.random.default_rng(seed).normal(size=(NUM_STATES, V)) * scale
    return Known(jnp.asarray(table, jnp.float32), max_length)


class Words(Pieces):
    """Encodes by the longest piece, and has the names that an `LLM` asks for."""

    eos_token_ids = (EOS,)
    generation_defaults = {"temperature": 0.5, "top_k": 7, "max_new_tokens": 5, "eos_token_id": EOS}

    def encode(self, text, add_special_tokens=False):
        token_ids = [1] if add_special_tokens else []
        while text:
            piece = max((piece for piece in self._pieces if text.startswith(piece)), key=len)
            token_ids.append(self._pieces.index(piece))
            text = text[len(piece) :]
        return token_ids

    def apply_chat_template(self, messages, add_generation_prompt=True, **values):
        turns = "".join(f"{message['role'][0]}:{message['content']};" for message in messages)
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
            edited = oracle.edit(model.logits_after(prompt + before), params, prompt=prompt, output=before, eos=(EOS,))
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
