"""Reported values: modes, ranks, top tokens, log-probabilities of supports and of prompts."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import rows
import tolerances

from jaxmask import Sample, SamplingBatch, SamplingParams, TopLogprobs, prompt_logprobs, sample
from jaxmask.params import LOGPROBS_MODES
from jaxmask.wire import Logprob, to_logprob_dicts

SLOW = pytest.mark.slow


def draw(logits, params, *, width=8, **options) -> Sample:
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    requests = [params] * len(logits) if isinstance(params, SamplingParams) else params
    batch = SamplingBatch.from_params(requests, vocab_size=logits.shape[1])
    return sample(jnp.asarray(logits), batch, step=0, width=width, **options)


def dicts(drawn: Sample, num=None) -> list[dict[int, Logprob]]:
    return to_logprob_dicts(drawn.token_ids, drawn.logprobs, drawn.ranks, drawn.top, num)


def near(value):
    return pytest.approx(value, abs=tolerances.LOGPROB)


def test_the_sampled_token_is_listed_once_with_its_rank():
    """P36: [9, 8, 7, 6], sampled 0 with three more, and sampled 3 with two more."""
    requests = [SamplingParams(seed=seed, temperature=2.0) for seed in range(64)]
    drawn = draw(np.tile([9, 8, 7, 6], (64, 1)), requests, num_logprobs=3, logprobs_mode="raw_logprobs")
    tokens = drawn.token_ids.tolist()
    first = dicts(drawn)[tokens.index(0)]
    assert list(first) == [0, 1, 2]
    assert [entry.rank for entry in first.values()] == [1, 2, 3]
    last = dicts(drawn, num=2)[tokens.index(3)]
    assert list(last) == [3, 0, 1]
    assert [entry.rank for entry in last.values()] == [4, 1, 2]
    assert last[3].logprob == near(-3.4401896986)
    # P37: it is listed where it is not among the top.
    last = dicts(drawn, num=1)[tokens.index(3)]
    assert [(token, entry.rank) for token, entry in last.items()] == [(3, 4), (0, 1)]


@functools.cache
def slopes_and_ties() -> tuple[Sample, Sample]:
    """200 draws of eight falling logits, and 64 of four equal ones above a fifth; nothing but the token is listed."""
    slope, ties = -np.arange(8) / 4, np.array([0, 0, 0, 0, -1, -np.inf, -np.inf, -np.inf])
    logits = np.concatenate([np.tile(slope, (200, 1)), np.tile(ties, (64, 1))])
    drawn = draw(logits, [SamplingParams(seed=seed) for seed in [*range(200), *range(64)]], num_logprobs=0)
    return jax.tree.map(lambda leaf: leaf[:200], drawn), jax.tree.map(lambda leaf: leaf[200:], drawn)


@pytest.mark.slow
def test_the_sampled_token_is_there_when_it_is_not_among_the_top():
    """P37: also where no other one is asked for."""
    drawn, _ = slopes_and_ties()
    listed = dicts(drawn)
    assert all(token in entry for token, entry in zip(drawn.token_ids.tolist(), listed, strict=True))
    deep = [entry for token, entry in zip(drawn.token_ids.tolist(), listed, strict=True) if token == 4]
    assert deep
    assert all(entry[4].rank == 5 and len(entry) == 1 for entry in deep)


@functools.cache
def small_rows() -> Sample:
    """Four cases in one batch: one likely token, no token, ties, and a row that opted out."""
    cases = [
        ([0, 10, 0, -np.inf], SamplingParams(top_k=1, seed=0)),
        ([np.nan] * 4, SamplingParams(seed=0)),
        ([0] * 4, SamplingParams(top_k=2, seed=0)),
        ([0] * 4, SamplingParams(top_k=2, seed=0, return_sampling_mask=False)),
    ]
    logits, params = zip(*cases, strict=True)
    return draw(np.array(logits), list(params), width=3, num_logprobs=3, return_support_logprobs=True)


def test_tokens_outside_the_support_are_not_listed():
    """P32, P87: strict JSON, and fewer tokens than asked for rather than -Infinity or a number that looks like one."""
    drawn = small_rows()
    assert drawn.top.token_ids[0].tolist() == [1, 4, 4]
    assert drawn.top.logprobs[0].tolist() == [0, -np.inf, -np.inf]
    assert dicts(drawn)[0] == {1: Logprob(0.0, 1)}

    def refuse(constant):
        raise ValueError(constant)

    text = json.dumps(dicts(drawn), allow_nan=False)
    assert json.loads(text, parse_constant=refuse)[0] == {"1": [0.0, 1, None]}


def test_a_row_without_a_token_lists_none():
    drawn = small_rows()
    assert drawn.ranks.tolist()[1] == 0
    assert drawn.top.token_ids.tolist()[1] == [4, 4, 4]
    assert dicts(drawn)[1] == {}


def test_ties_push_the_rank_up():
    """Rank = number of entries at least as large, as in vLLM."""
    _, drawn = slopes_and_ties()
    assert {int(token): int(rank) for token, rank in zip(drawn.token_ids, drawn.ranks, strict=True)} == {
        **dict.fromkeys(range(4), 4),
        4: 5,
    }


def expected_report(mode, raw, edited, keep, params, num):
    """Values over the ids of one row under a mode, and its first `num` ids in canonical order."""
    values = oracle.reported(mode, raw, edited, keep, params)
    basis = oracle.finite_or_excluded(raw if mode.startswith("raw") else np.where(keep, edited, -np.inf))
    order = np.argsort(-basis.astype(np.float64), kind="stable")
    return values, basis, order[: min(num, int(np.isfinite(basis).sum()))]


@pytest.mark.parametrize(
    ("vocab_size", "width", "num", "mode"),
    [
        (300, 8, 5, "raw_logprobs"),
        *(pytest.param(300, 8, 5, mode, marks=SLOW) for mode in LOGPROBS_MODES if mode != "raw_logprobs"),
        # Where columns hold whole rows, all of whose ids are listed.
        pytest.param(40, 30, 40, "processed_logits", marks=SLOW),
    ],
)
def test_every_mode_against_the_oracle(vocab_size, width, num, mode):
    """Values, ranks and top tokens of adversarial rows; narrow columns, so that every path is taken."""
    rng = np.random.default_rng([vocab_size, num])
    logits = rows.adversarial(rng, 180, vocab_size)
    # Beyond this, the sums behind raw log-probabilities leave float32.
    logits = np.where(np.abs(logits) > 1e30, 0, logits).astype(np.float32)
    grid = rows.filter_grid(vocab_size)
    params = [grid[i] for i in rng.permutation(len(grid))[:180]]
    batch = rows.with_seeds(SamplingBatch.from_params(params, vocab_size=vocab_size))
    drawn = sample(
        jnp.asarray(logits), batch, step=1, width=width, logprobs_mode=mode, num_logprobs=num,
        return_support_logprobs=True,
    )  # fmt: skip
    keep = np.asarray(drawn.support.to_mask())
    ids, values = np.asarray(drawn.top.token_ids), np.asarray(drawn.top.logprobs)
    assert_log_probs_of_support(drawn, logits, keep, np.array([request.temperature or 1.0 for request in params]))
    for row, request in enumerate(params):
        right, basis, top = expected_report(mode, logits[row], logits[row], keep[row], request, num)
        token = int(drawn.token_ids[row])
        if not drawn.is_valid[row]:
            assert np.isneginf(drawn.logprobs[row])
            continue
        np.testing.assert_allclose(drawn.logprobs[row], right[token], atol=tolerances.LOGPROB, rtol=tolerances.LOGPROB)
        assert int(drawn.ranks[row]) == (basis >= basis[token]).sum()
        assert ids[row].tolist() == top.tolist() + [vocab_size] * (num - len(top))
        np.testing.assert_allclose(
            values[row, : len(top)], right[top], atol=tolerances.LOGPROB, rtol=tolerances.LOGPROB
        )
        assert np.isneginf(values[row, len(top) :]).all()


def assert_log_probs_of_support(drawn, logits, keep, temperature=1.0):
    """Beside every compact id, normalised over the support, whatever the mode reports of the token."""
    cells = np.asarray(drawn.support.cells())
    ids = np.where(cells, drawn.support.token_ids, 0)
    right = oracle.log_probs(oracle.finite_or_excluded(logits), keep, temperature)
    expected = np.where(cells, np.take_along_axis(right, ids, axis=1), -np.inf)
    np.testing.assert_allclose(drawn.support_logprobs, expected, atol=tolerances.LOGPROB, rtol=tolerances.LOGPROB)


def test_log_probs_of_the_support():
    rng = np.random.default_rng(5)
    logits = (3 * rng.normal(size=(60, 400))).astype(np.float32)
    params = [SamplingParams(seed=i, **({"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.02})[i % 3]) for i in range(60)]
    drawn = draw(logits, params, width=8, return_support_logprobs=True)
    assert_log_probs_of_support(drawn, logits, np.asarray(drawn.support.to_mask()))
    counts = np.asarray(drawn.support.counts)
    assert (counts > 8).any()
    total = np.exp(np.asarray(drawn.support_logprobs, np.float64)).sum(axis=1)
    np.testing.assert_allclose(total[counts <= 8], 1, atol=tolerances.LOGPROB)
    cells = np.asarray(drawn.support.cells())
    at_token = (np.asarray(drawn.support.token_ids) == np.asarray(drawn.token_ids)[:, None]) & cells
    found = at_token.any(axis=1)
    value = np.where(at_token, drawn.support_logprobs, 0).sum(axis=1)
    np.testing.assert_array_equal(value[found], np.asarray(drawn.logprobs)[found])


def test_rows_that_opted_out_give_no_log_probs_of_supports():
    kept, left = small_rows().support_logprobs[2:]
    np.testing.assert_allclose(kept, [-np.log(2)] * 2 + [-np.inf], atol=tolerances.LOGPROB)
    assert np.isneginf(left).all()


@pytest.mark.slow
def test_greedy_rows_that_opted_out_still_report_over_the_whole_row():
    """They go through the columns; the numbers are those of rows that kept their supports."""
    rng = np.random.default_rng(3)
    logits = np.concatenate([rng.normal(size=(20, 300)), np.zeros((2, 300)), rng.integers(0, 3, (10, 300))])
    params = [SamplingParams(temperature=0.0, return_sampling_mask=returns) for returns in (True, False)]
    drawn = draw(np.tile(logits, (2, 1)), [request for request in params for _ in logits], num_logprobs=3)
    kept, left = (
        jax.tree.map(lambda leaf, half=half: leaf.reshape(2, 32, *leaf.shape[1:])[half], drawn) for half in (0, 1)
    )
    assert np.asarray(kept.support.counts).all()
    assert not np.asarray(left.support.counts).any()
    for one, other in ((kept.token_ids, left.token_ids), (kept.logprobs, left.logprobs), (kept.ranks, left.ranks)):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(kept.top.token_ids, left.top.token_ids)
    np.testing.assert_array_equal(kept.top.logprobs, left.top.logprobs)


@pytest.mark.parametrize("num", [-1, 5])
def test_a_number_of_top_tokens_outside_its_range_is_refused(num):
    with pytest.raises(ValueError, match=rf"num_logprobs must be None or an integer in \[0, 4\], got {num}"):
        draw(np.zeros(4), SamplingParams(), num_logprobs=num)


SEQUENCE = [3, 1, 4, 1, 5]


# One program of each mode, for tests that look at numbers; outside of jit, errors name what is wrong.
prompt_scores = jax.jit(prompt_logprobs, static_argnames=("vocab_size", "logprobs_mode", "num_logprobs"))


def teacher_forcing(V: int = 8) -> np.ndarray:
    """Logits [1, 5, V]; those at place t say something of token t + 1 and of no other."""
    return np.random.default_rng(0).normal(size=(1, 5, V)).astype(np.float32)


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_prompt_log_probs(mode):
    """P38: the mode counts, sampling parameters do not; P39: place t scores token t + 1, and nothing the first."""
    logits = teacher_forcing()
    found = prompt_scores(
        jnp.asarray(logits), jnp.array([SEQUENCE]), jnp.array([5]), logprobs_mode=mode, num_logprobs=3
    )
    right = logits[0, :-1].astype(np.float64) if mode.endswith("logits") else oracle.log_probs(logits[0, :-1])
    assert found.logprobs.shape == (1, 4)
    for place, token in enumerate(SEQUENCE[1:]):
        assert float(found.logprobs[0, place]) == near(right[place, token])
        assert int(found.ranks[0, place]) == (right[place] >= right[place, token]).sum()
        top = np.argsort(-right[place])[:3]
        assert found.top.token_ids[0, place].tolist() == top.tolist()
        np.testing.assert_allclose(found.top.logprobs[0, place], right[place, top], atol=tolerances.LOGPROB)


def test_the_last_three_tokens_of_a_sequence_use_the_places_before_them():
    """P39: [p0, p1, a, b, eos] with a response of three tokens uses the logits at places 1, 2, 3."""
    # As it comes, outside of jit.
    logits = jnp.asarray(teacher_forcing())
    whole = prompt_logprobs(logits, jnp.array([SEQUENCE]), jnp.array([5]))
    np.testing.assert_allclose(
        whole.logprobs[0, -3:],
        [oracle.log_probs(teacher_forcing()[0, place])[SEQUENCE[place + 1]] for place in (1, 2, 3)],
        atol=tolerances.LOGPROB,
    )


@pytest.mark.slow
def test_places_past_a_prompt_say_nothing_and_touch_nothing():
    logits = np.tile(teacher_forcing(), (2, 1, 1))
    logits[1, 2:] = np.nan
    ids = np.array([SEQUENCE, [*SEQUENCE[:3], -7, 10**6]])
    found = prompt_scores(jnp.asarray(logits), jnp.asarray(ids), jnp.array([5, 3]), num_logprobs=2)
    np.testing.assert_array_equal(found.logprobs[1, :2], found.logprobs[0, :2])
    assert np.isneginf(found.logprobs[1, 2:]).all()
    assert not np.asarray(found.ranks[1, 2:]).any()
    assert (np.asarray(found.top.token_ids[1, 2:]) == 8).all()
    assert np.isneginf(found.top.logprobs[1, 2:]).all()


def test_prompts_of_one_token_have_nothing_to_report():
    found = prompt_logprobs(jnp.zeros((2, 1, 8)), jnp.array([[3], [4]]), jnp.array([1, 1]), num_logprobs=2)
    assert found.logprobs.shape == found.ranks.shape == (2, 0)
    assert found.top.token_ids.shape == (2, 0, 2)


def test_processed_logits_stay_finite():
    """3e38 / 0.7 is beyond float32."""
    drawn = draw([3e38, 0], SamplingParams(temperature=0.7, seed=0), logprobs_mode="processed_logits", num_logprobs=1)
    assert drawn.logprobs.tolist() == [float(np.finfo(np.float32).max)]
    assert np.isfinite(drawn.top.logprobs).all()


def test_a_padded_head_is_no_part_of_a_prompts_distribution():
    logits = teacher_forcing()
    padded = np.concatenate([logits, np.full((1, 5, 3), 50, np.float32)], axis=2)
    ids, lengths = jnp.array([SEQUENCE]), jnp.array([5])
    found = prompt_scores(jnp.asarray(padded), ids, lengths, vocab_size=8, num_logprobs=3)
    expected = prompt_scores(jnp.asarray(logits), ids, lengths, logprobs_mode="raw_logprobs", num_logprobs=3)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


def test_errors_of_prompt_log_probs():
    logits, ids = jnp.asarray(teacher_forcing()), jnp.array([SEQUENCE])
    with pytest.raises(ValueError, match=r"logprobs_mode must be one of .*, got 'raw'"):
        prompt_logprobs(logits, ids, jnp.array([5]), logprobs_mode="raw")
    for wrong, lengths, message in (
        ([3, 1, 8, 1, 5], 5, r"prompt_ids must be in \[0, 8\), got \[8\] in row 0"),
        ([3, 1, -1, 1, 5], 5, r"prompt_ids must be in \[0, 8\), got \[-1\] in row 0"),
        (SEQUENCE, 0, r"prompt_lengths must be in \[1, 5\], got 0 in row 0"),
        (SEQUENCE, 9, r"prompt_lengths must be in \[1, 5\], got 9 in row 0"),
    ):
        with pytest.raises(ValueError, match=message):
            prompt_logprobs(logits, jnp.array([wrong]), jnp.array([lengths]))
    with pytest.raises(ValueError, match=r"vocab_size must be in \[1, 8\], got 9"):
        prompt_logprobs(logits, ids, jnp.array([5]), vocab_size=9)
    with pytest.raises(ValueError, match=r"num_logprobs must be an integer in \[0, 8\], got 9"):
        prompt_logprobs(logits, ids, jnp.array([5]), num_logprobs=9)


def test_dicts_of_given_arrays():
    top = TopLogprobs(jnp.array([[2, 0, 9]]), jnp.array([[-0.5, -1.0, -jnp.inf]]))
    given = (jnp.array([0]), jnp.array([-1.0]), jnp.array([2], jnp.int32), top)
    assert to_logprob_dicts(*given) == [{0: Logprob(-1.0, 2), 2: Logprob(-0.5, 1)}]
    assert to_logprob_dicts(*given, num=0) == [{0: Logprob(-1.0, 2)}]


def test_prompts_of_another_shape_are_refused(unchecked):
    with pytest.raises(ValueError, match=r"got \(1, 5, 8\), \(1, 4\) and \(1,\)"):
        prompt_logprobs(jnp.asarray(teacher_forcing()), jnp.array([SEQUENCE[:4]]), jnp.array([4]))
