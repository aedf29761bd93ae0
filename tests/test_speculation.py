import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from mock_model import Mock, V, fixed_model, random_model

from jaxmask import DraftModel, Finish, PromptLookup, Rollout, SamplingBatch, SamplingParams, generate, stream
from jaxmask.speculation import RewindableCache, Speculation, VerifyingModel
from jaxmask.state import Decoding

PROMPTS = jnp.array([[3, 1, 4, 1], [1, 5, 0, 0], [9, 2, 6, 5], [3, 0, 0, 0]], jnp.int32)
LENGTHS = jnp.array([4, 2, 4, 1], jnp.int32)
NEW_TOKENS = 12
# Every kind of edit, of which some look back at tokens that were only guessed.
EDITED = [
    SamplingParams(seed=1, top_k=5, temperature=0.8, max_tokens=3, ignore_eos=True),
    SamplingParams(seed=2, top_k=8, top_p=0.9, repetition_penalty=1.5, max_tokens=None),
    SamplingParams(seed=3, top_k=4, frequency_penalty=0.5, presence_penalty=0.25, max_tokens=None),
    SamplingParams(seed=4, top_k=7, min_p=0.02, bad_words=[[1], [2, 5]], logit_bias={7: 2.0}, min_tokens=5),
]


def run(model, params=EDITED, eos=(0, 11), **options) -> Rollout:
    batch = SamplingBatch.from_params(params, vocab_size=V, eos_token_ids=eos)
    return generate(model, batch, PROMPTS, LENGTHS, max_new_tokens=NEW_TOKENS, width=8, **options)


@functools.cache
def plain() -> Rollout:
    return run(random_model())


def assert_same(found: Rollout, expected: Rollout) -> None:
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    np.testing.assert_array_equal(found.finish, expected.finish)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=tolerances.LOGPROB)
    assert found.support.to_lists() == expected.support.to_lists()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Oracle:
    """Guesses the tokens of a rollout, the first `num_right` of each row's right and the next one wrong."""

    token_ids: jax.Array
    num_right: jax.Array
    num_tokens: int = dataclasses.field(default=3, metadata={"static": True})

    def start(self, prompt_ids, prompt_lengths, *, max_new_tokens, group_size, prefill_chunk_size):
        return jnp.zeros(prompt_ids.shape[0] * group_size, jnp.int32)

    def propose(self, state, batch, draw):
        places = state.drafts[:, None] + jnp.arange(self.num_tokens, dtype=jnp.int32)[None, :]
        ids = jnp.take_along_axis(self.token_ids, jnp.minimum(places, self.token_ids.shape[1] - 1), axis=1)
        return jnp.where(places < self.num_right[:, None], ids, (ids + 1) % V), state.drafts

    def keep(self, drafts, token_ids, counts):
        return drafts + counts


@pytest.mark.parametrize("num_right", [[0, 0, 0, 0], [99, 99, 99, 99], [2, 5, 3, 0]])
def test_right_and_wrong_guesses_leave_the_rollout_as_it_is(num_right):
    """Tokens, supports, log-probabilities and ends are those without guesses, with every edit replayed on them."""
    oracle = Oracle(plain().token_ids, jnp.array(num_right, jnp.int32))
    found = run(random_model(), speculation=oracle)
    assert_same(found, plain())
    # k + 1 tokens a step while guesses are right, one where they are wrong.
    lengths = np.asarray(plain().lengths)
    fast = np.minimum(num_right, lengths) // 4
    slow = lengths - 4 * fast
    if max(num_right) == 0:
        np.testing.assert_array_equal(found.num_steps, lengths)
    elif min(num_right) == 99:
        np.testing.assert_array_equal(found.num_steps, -(-lengths // 4))
    else:
        assert (np.asarray(found.num_steps) <= fast + slow).all()
        assert (np.asarray(found.num_steps) < lengths)[1]


# Nothing but filters: cheaper to compile, and one program for the tests below.
FILTERED = [SamplingParams(seed=seed, top_k=3, max_tokens=None) for seed in range(4)]


def test_a_stop_id_among_right_guesses_ends_the_row():
    """P39, P48: what was guessed and drawn behind it is not there."""
    logits = np.full(V, -9.0)
    logits[[5, 6, 7]] = [2, 2, 2]
    expected = run(fixed_model(logits), FILTERED, eos=(6, 39))
    assert Finish.STOP in expected.finish.tolist()
    oracle = Oracle(expected.token_ids, jnp.full(4, 99, jnp.int32))
    assert_same(run(fixed_model(logits), FILTERED, eos=(6, 39), speculation=oracle), expected)


def test_a_row_that_breaks_among_guesses_keeps_what_came_before():
    """P24."""
    model = random_model(3)
    clean = run(model, FILTERED, eos=(6, 39))
    assert int(clean.lengths[2]) > 4
    state = model.state_after([*PROMPTS[2].tolist(), *clean.token_ids[2, :3].tolist()])
    broken = Mock(model.table.at[state].set(jnp.nan))
    expected = run(broken, FILTERED, eos=(6, 39))
    assert expected.finish[2] == Finish.ERROR
    oracle = Oracle(clean.token_ids, jnp.full(4, 99, jnp.int32))
    assert_same(run(broken, FILTERED, eos=(6, 39), speculation=oracle), expected)


def test_prompt_lookup_streams():
    """A stream gives several tokens a step, those of `generate`; text that repeats itself is guessed."""
    table = np.full((4099, V), -50.0, np.float32)
    counting = Mock(jnp.asarray(table))
    # The mock goes from prefix to row: make 5, 6, 7, 5, 6, 7, ... follow each prompt.
    for prompt, length in zip(PROMPTS.tolist(), LENGTHS.tolist(), strict=True):
        text = prompt[:length]
        for place in range(NEW_TOKENS):
            table[counting.state_after(text), 5 + place % 3] = 50.0
            text.append(5 + place % 3)
    model = Mock(jnp.asarray(table))
    batch = SamplingBatch.from_params(FILTERED, vocab_size=V, eos_token_ids=(6, 39), support_bound=3)
    batch = dataclasses.replace(batch, stop_token_ids=jnp.full_like(batch.stop_token_ids, V))
    rows: list[list[int]] = [[] for _ in FILTERED]
    num_steps = 0
    lookup = PromptLookup(num_tokens=3)
    for new in stream(model, batch, PROMPTS, LENGTHS, max_new_tokens=NEW_TOKENS, width=3, speculation=lookup):
        num_steps += 1
        for row, ids, count in zip(rows, new.token_ids.tolist(), new.counts.tolist(), strict=True):
            row += ids[:count]
        assert ((np.asarray(new.support.counts) > 0).sum(axis=1) == np.asarray(new.counts)).all()
    assert rows == [[5, 6, 7] * 4] * 4
    # Four tokens until the pattern is there, then four a step.
    assert num_steps <= 4 + 2


def test_a_draft_model_draws_with_the_models_noise():
    """The same model as its own draft is always right; another one sometimes; both leave the rollout as it is."""
    model, eos = random_model(), (6, 39)
    expected = run(model, FILTERED, eos=eos)
    itself = run(model, FILTERED, eos=eos, speculation=DraftModel(model, num_tokens=3))
    assert_same(itself, expected)
    np.testing.assert_array_equal(itself.num_steps, -(-np.asarray(expected.lengths) // 4))
    near = Mock(model.table + 0.5 * random_model(seed=1, scale=1.0).table)
    close = run(model, FILTERED, eos=eos, speculation=DraftModel(near, num_tokens=3))
    assert_same(close, expected)
    assert int(itself.num_steps.sum()) < int(close.num_steps.sum()) < int(expected.lengths.sum())


def lookup(text, **options) -> list[int]:
    speculation = PromptLookup(**options)
    # One shape for all: the cells past the text are never read.
    ids = jnp.array([text + [text[-1]] * (12 - len(text))], jnp.int32)
    lengths = jnp.array([len(text)], jnp.int32)
    drafts = speculation.start(ids, lengths, max_new_tokens=4, group_size=1, prefill_chunk_size=None)
    batch = SamplingBatch.from_params(SamplingParams(), vocab_size=V)
    zeros = jnp.zeros(1, jnp.int32)
    state = Decoding(jnp.array(text[-1:], jnp.int32), None, None, zeros, zeros, drafts)
    return speculation.propose(state, batch, lambda *_: None)[0][0].tolist()


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        # The longest match first, whatever is nearer.
        ([1, 2, 3, 8, 9, 5, 3, 7, 1, 2, 3], {"num_tokens": 2}, [8, 9]),
        # Of equally long ones the latest.
        ([4, 6, 1, 1, 4, 7, 2, 2, 4], {"num_tokens": 3, "max_ngram": 1}, [7, 2, 2]),
        # A match that reaches the end goes on with what it would guess next: the text repeats itself.
        ([5, 6, 7, 5, 6, 7], {"num_tokens": 5}, [5, 6, 7, 5, 6]),
        ([8, 8], {"num_tokens": 3}, [8, 8, 8]),
        # None long enough: the last token again.
        ([1, 2, 3, 4, 2], {"num_tokens": 2, "min_ngram": 2}, [2, 2]),
        ([3], {"num_tokens": 2}, [3, 3]),
    ],
)
def test_prompt_lookup(text, options, expected):
    assert lookup(text, **options) == expected


@pytest.mark.slow
def test_the_law_is_exact():
    """Frequencies of first tokens over many seeds are the truncated law's, whatever was guessed (chi-square)."""
    logits = np.full(V, -9.0)
    logits[[2, 3, 5, 7]] = [1.0, 0.5, 0.0, -0.5]
    model, num_rows, num_tokens = fixed_model(logits), 512, 8
    batch = SamplingBatch.from_params(
        [SamplingParams(seed=seed, top_k=3, max_tokens=None) for seed in range(num_rows)], vocab_size=V, support_bound=3
    )
    ids, lengths = jnp.tile(jnp.array([[2, 3, 5, 2]], jnp.int32), (num_rows, 1)), jnp.full(num_rows, 4, jnp.int32)
    lookup = PromptLookup(num_tokens=2)
    found = generate(model, batch, ids, lengths, max_new_tokens=num_tokens, width=3, speculation=lookup)
    assert int(found.num_steps.sum()) < num_rows * num_tokens
    assert found.support.to_lists() == [[[2, 3, 5]] * num_tokens] * num_rows
    law = np.exp([1.0, 0.5, 0.0]) / np.exp([1.0, 0.5, 0.0]).sum()
    counts = np.array([(np.asarray(found.token_ids) == token).sum() for token in (2, 3, 5)])
    expected = law * num_rows * num_tokens
    assert counts.sum() == num_rows * num_tokens
    # Two degrees of freedom: 18.4 is passed by chance once in 10,000.
    assert ((counts - expected) ** 2 / expected).sum() < 18.4


def test_what_cannot_guess_is_refused(unchecked):
    with pytest.raises(ValueError, match="num_tokens must be at least 1, got 0"):
        PromptLookup(num_tokens=0)
    with pytest.raises(ValueError, match=r"min_ngram must be an integer, got float 1\.5"):
        PromptLookup(min_ngram=1.5)
    with pytest.raises(ValueError, match=r"min_ngram must be in \[1, max_ngram=2\], got 3"):
        PromptLookup(max_ngram=2, min_ngram=3)
    with pytest.raises(ValueError, match="num_tokens must be at least 1, got 0"):
        DraftModel(random_model(), num_tokens=0)

    class Plain:
        max_length = 64

        def prefill(self): ...

        def decode(self): ...

    with pytest.raises(ValueError, match="speculation needs a model with extend_logits, which Plain lacks"):
        run(Plain(), speculation=PromptLookup())
    with pytest.raises(ValueError, match="speculation must be a Speculation such as PromptLookup"):
        run(random_model(), speculation="ngram")
    with pytest.raises(ValueError, match="the draft model must have prefill and decode, got NoneType"):
        run(random_model(), speculation=DraftModel(None))
    narrow = Mock(random_model().table[:, : V - 1])
    with pytest.raises(ValueError, match="the draft model must have 40 ids, got 39"):
        run(random_model(), speculation=DraftModel(narrow))
    small = random_model(max_length=20)
    with pytest.raises(ValueError, match=r"prompt width 4 \+ max_new_tokens 12 \+ 6 guesses exceed .* max_length 20"):
        run(random_model(), speculation=DraftModel(small, num_tokens=5))


def test_the_protocols():
    model = random_model()
    assert isinstance(model, VerifyingModel)
    assert isinstance(model.prefill(PROMPTS, LENGTHS, capacity=4), RewindableCache)
    assert isinstance(PromptLookup(), Speculation)
    assert isinstance(DraftModel(model), Speculation)
