import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances
from jax.sharding import PartitionSpec

from jaxmask import History, SamplingBatch, SamplingParams, shards
from jaxmask.edits import EDITS, EditTerms, apply_edits

pytestmark = pytest.mark.unoptimized
# Those that ask for equal bits.
OPTIMIZED = pytest.mark.optimized

NO = -np.inf


def edited(logits, params, prompts=None, outputs=None, *, eos=(), columns=None) -> np.ndarray:
    """Edited rows, from lists of what was prompted and generated."""
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    requests = [params] if isinstance(params, SamplingParams) else params
    batch = SamplingBatch.from_params(requests, vocab_size=logits.shape[1], eos_token_ids=eos)
    outputs = outputs or [[]] * len(requests)
    history = History.from_lists(prompts or [[]] * len(requests), outputs, batch)
    steps = jnp.asarray(np.array([len(output) for output in outputs], np.int32))
    history = history if batch.needs_history else None
    if columns is None:
        terms, values = EditTerms.for_vocabulary(batch, history, steps), jnp.asarray(logits)
    else:
        terms = EditTerms.for_ids(batch, history, steps, jnp.asarray(columns))
        values = jnp.asarray(np.take_along_axis(logits, np.minimum(columns, logits.shape[1] - 1), axis=1))
    return np.asarray(apply_edits(values, terms, batch))


def assert_near(actual, expected):
    np.testing.assert_allclose(actual, np.asarray(expected, np.float32), rtol=tolerances.EDIT, atol=tolerances.EDIT)


P15 = [4, 1, 1, 1, 1, 3, 2, 1]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        pytest.param([[5, 6]], [[4, 1, 1, 1, 1, 1.5, 1, 1]], id="alone"),
        pytest.param(
            [[5, 6], [1, 2, 3, 7]], [[4, 1, 1, 1, 1, 1.5, 1, 1], [4, 0.5, 0.5, 0.5, 1, 3, 2, 0.5]], id="beside a longer"
        ),
        pytest.param([[0, 5, 6]], [[2, 1, 1, 1, 1, 1.5, 1, 1]], id="id 0 really occurs"),
    ],
)
def test_padding_of_prompts_is_not_counted(prompts, expected):
    """P15."""
    params = [SamplingParams(repetition_penalty=2.0)] * len(prompts)
    assert_near(edited([P15] * len(prompts), params, prompts), expected)


def test_cells_past_a_prompts_length_are_never_read():
    batch = SamplingBatch.from_params(SamplingParams(repetition_penalty=2.0), vocab_size=8)
    for padding in (0, 3, 7, -1, 8, 2**31 - 1):
        history = History.start(jnp.array([[5, 6, padding, padding]], jnp.int32), jnp.array([2], jnp.int32), batch)
        assert np.flatnonzero(history.in_prompt).tolist() == [5, 6]


@OPTIMIZED
def test_repetition_sees_prompt_and_output_the_others_only_the_output():
    """P16."""
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    logits = [1, 1, 1, 1, -1]
    assert_near(edited(logits, params, [[1, 1, 2]], [[2, 3, 3]]), [[1, 0.5, -0.25, -0.75, -1]])
    only_repetition = edited(logits, SamplingParams(repetition_penalty=2.0), [[1, 1, 2]])
    np.testing.assert_array_equal(edited(logits, params, [[1, 1, 2]]), only_repetition)
    assert_near(only_repetition, [[1, 0.5, 0.5, 1, -1]])


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [(1.5, [1.3333333333, -3, 0, 0.3333333333]), (0.5, [4, -1, 0, 1]), (1.0, [2, -2, 0, 0.5])],
)
def test_repetition_divides_positive_and_multiplies_other_logits(penalty, expected):
    """P17."""
    assert_near(edited([2, -2, 0, 0.5], SamplingParams(repetition_penalty=penalty), [[0, 1]], [[2, 3]]), [expected])


@OPTIMIZED
def test_a_row_without_penalties_is_left_alone():
    """P18: bit for bit, whatever its neighbour does."""
    logits = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    penalized = SamplingParams(repetition_penalty=1.3, frequency_penalty=1.0, presence_penalty=0.5, logit_bias={1: 3.0})
    rows = edited(logits, [penalized, SamplingParams()], [[1, 2], [3]], [[2], [4]])
    np.testing.assert_array_equal(rows[1], logits[1])
    assert (rows[0] != logits[0]).sum() == 2


def test_placeholders_in_the_history_count_for_nothing():
    """P18: -1 would wrap to the last id."""
    batch = SamplingBatch.from_params([SamplingParams(frequency_penalty=1.0)] * 2, vocab_size=4)
    history = History.from_lists([[0], [0]], [[2], []], batch)
    history = history.append(jnp.array([-1, 3], jnp.int32), jnp.array([False, True]))
    terms = EditTerms.for_vocabulary(batch, history, jnp.array([1, 1], jnp.int32))
    assert_near(apply_edits(jnp.zeros((2, 4)), terms, batch), [[0, 0, -1, 0], [0, 0, 0, -1]])


def test_append_leaves_inactive_rows_alone():
    params = SamplingParams(frequency_penalty=1.0, bad_words=[[1, 2, 3]])
    batch = SamplingBatch.from_params([params] * 2, vocab_size=4)
    before = History.from_lists([[], []], [[1], [1]], batch)
    after = before.append(jnp.array([2, 2], jnp.int32), jnp.array([True, False]))
    assert after.output_counts.tolist() == [[0, 1, 1, 0], [0, 1, 0, 0]]
    # Words are padded to 4 ids, so the tail holds 3.
    assert after.tail.tolist() == [[4, 1, 2], [4, 4, 1]]
    terms = EditTerms.for_vocabulary(batch, after, jnp.array([2, 1], jnp.int32))
    assert terms.ends_bad_word.tolist() == [[False, False, False, True], [False] * 4]


def test_history_keeps_only_what_is_needed():
    def of(**settings):
        batch = SamplingBatch.from_params(SamplingParams(**settings), vocab_size=4)
        history = History.from_lists([[1]], [[2]], batch)
        return [x is not None for x in (history.in_prompt, history.output_counts, history.tail)]

    assert of() == [False, False, False]
    assert of(repetition_penalty=2.0) == [True, True, False]
    assert of(frequency_penalty=1.0) == of(presence_penalty=1.0) == [False, True, False]
    assert of(bad_words=[[1]]) == [False, False, True]


def test_history_needs_one_list_per_row():
    batch = SamplingBatch.from_params([SamplingParams()] * 2, vocab_size=4)
    with pytest.raises(ValueError, match=r"one list per row \(2\), got 1 and 2"):
        History.from_lists([[1]], [[], []], batch)


@pytest.mark.parametrize(
    ("word", "output", "is_banned"),
    [
        ([4, 5, 6], [5], False),
        ([4, 5, 6], [4, 5], True),
        ([4, 5, 6], [9, 4, 5], True),
        ([4, 5, 6], [4, 9, 5], False),
        ([4, 5, 6], [4, 5, 9], False),
        ([4, 5, 6], [], False),
        ([6], [], True),
        ([6], [4, 5], True),
        ([0, 0, 6], [0], False),
        ([0, 0, 6], [0, 0], True),
    ],
)
def test_a_bad_word_ends_where_its_head_is_the_tail_of_the_output(word, output, is_banned):
    """P19."""
    row = edited(np.zeros(10), SamplingParams(bad_words=[word]), [[4, 5]], [output])[0]
    assert row.tolist() == [NO if i == 6 and is_banned else 0 for i in range(10)]


def test_bad_words_of_several_lengths_and_rows():
    params = [SamplingParams(bad_words=[[1], [2, 3], [4, 5, 6]]), SamplingParams(), SamplingParams(bad_words=[[2, 7]])]
    rows = edited(np.zeros((3, 8)), params, outputs=[[4, 5], [4, 5], [4, 2]])
    assert [np.flatnonzero(np.isneginf(row)).tolist() for row in rows] == [[1, 6], [], [7]]


def test_min_tokens_withholds_eos_and_stop_ids_until_enough_were_generated():
    """P20: every id of the list, and the prompt does not count."""
    params = SamplingParams(min_tokens=2, stop_token_ids=[1])
    logits, prompt = [0, 0, 9, 8, 1], [4] * 5
    for num_generated in range(4):
        row = edited(logits, params, [prompt], [[4] * num_generated], eos=[2, 3])[0]
        assert np.flatnonzero(np.isneginf(row)).tolist() == ([1, 2, 3] if num_generated < 2 else [])


def test_only_allowed_ids_stay_and_rows_without_a_list_are_free():
    params = [SamplingParams(allowed_token_ids=[3, 1]), SamplingParams(), SamplingParams(allowed_token_ids=[0])]
    rows = edited(np.arange(12).reshape(3, 4), params)
    assert rows.tolist() == [[NO, 1, NO, 3], [4, 5, 6, 7], [8, NO, NO, NO]]


def test_full_vector():
    """P27: bias before the penalties."""
    params = SamplingParams(
        logit_bias={3: 2.2}, repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1, top_k=4
    )
    expected = [[1.5384615385, 1, 0.5, 1.3923076923, -1, 0.9307692308]]
    assert_near(edited([2, 1, 0.5, 0, -1, 1.6], params, [[0]], [[3, 5]]), expected)


def test_a_bias_cannot_bring_back_an_id_that_is_not_allowed():
    params = SamplingParams(allowed_token_ids=[1], logit_bias={0: 100.0, 1: 1.0}, repetition_penalty=2.0)
    assert edited([5, 5, 5], params, [[0, 1]]).tolist() == [[NO, 3, NO]]


def everything(rng, vocab_size, num_rows):
    """Rows in which every edit has something to do, on dyadic numbers so that float32 is exact."""
    params, prompts, outputs = [], [], []
    for _ in range(num_rows):
        ids = [int(i) for i in rng.integers(0, vocab_size, 12)]
        outputs.append([int(i) for i in rng.integers(0, vocab_size, rng.integers(0, 6))])
        prompts.append(ids[: rng.integers(1, 5)])
        words = [ids[3:4], [*outputs[-1][-2:], ids[4]], ids[5:7]]
        params.append(
            SamplingParams(
                allowed_token_ids=list(set(range(vocab_size)) - set(ids[7:8])),
                logit_bias={ids[8]: 1.5, ids[9]: -0.5},
                min_tokens=3,
                stop_token_ids=ids[10:12],
                repetition_penalty=float(rng.choice([0.5, 1.0, 2.0])),
                frequency_penalty=float(rng.choice([-0.5, 0.0, 0.25])),
                presence_penalty=float(rng.choice([-1.0, 0.0, 0.5])),
                bad_words=words,
            )
        )
    return params, prompts, outputs


@OPTIMIZED
def test_all_edits_together_are_the_oracles():
    rng = np.random.default_rng(1)
    V = 33
    params, prompts, outputs = everything(rng, V, 60)
    logits = (rng.integers(-64, 64, (60, V)) / 8).astype(np.float32)
    logits[rng.random((60, V)) < 0.1] = NO
    expected = [
        oracle.edit(row, request, prompt=prompt, output=output, eos=[0, 5])
        for row, request, prompt, output in zip(logits, params, prompts, outputs, strict=True)
    ]
    np.testing.assert_array_equal(edited(logits, params, prompts, outputs, eos=[0, 5]), np.stack(expected))


@OPTIMIZED
def test_kept_columns_are_edited_like_whole_rows():
    """What the learner replays on kept ids is what the sampler did on the vocabulary."""
    rng = np.random.default_rng(2)
    V = 33
    params, prompts, outputs = everything(rng, V, 60)
    logits = rng.normal(size=(60, V)).astype(np.float32)
    columns = np.stack([rng.permutation(V)[:9] for _ in range(60)]).astype(np.int32)
    whole = edited(logits, params, prompts, outputs)
    kept = edited(logits, params, prompts, outputs, columns=columns)
    np.testing.assert_array_equal(kept, np.take_along_axis(whole, columns, axis=1))
    assert np.isneginf(kept).any()
    assert (kept != np.take_along_axis(logits, columns, axis=1)).any(axis=1).mean() > 0.5


def everything_of(seed, vocab_size, num_rows):
    """Batch, history and steps of rows in which every edit has something to do."""
    params, prompts, outputs = everything(np.random.default_rng(seed), vocab_size, num_rows)
    batch = SamplingBatch.from_params(params, vocab_size=vocab_size, eos_token_ids=[0, 5])
    steps = jnp.asarray(np.array([len(output) for output in outputs], np.int32))
    return batch, History.from_lists(prompts, outputs, batch), steps


@OPTIMIZED
@pytest.mark.parametrize("seed", [3, 4])
def test_terms_of_some_ids_are_those_of_the_vocabulary(seed):
    V, num_rows = 33, 60
    batch, history, steps = everything_of(seed, V, num_rows)
    rng = np.random.default_rng(seed)
    token_ids = np.stack([rng.permutation(V) for _ in range(num_rows)]).astype(np.int32)
    whole = jax.tree.leaves(EditTerms.for_vocabulary(batch, history, steps))
    some = jax.tree.leaves(EditTerms.for_ids(batch, history, steps, jnp.asarray(token_ids)))
    assert len(whole) == len(some) == 6
    for term, term_of_ids in zip(whole, some, strict=True):
        assert term_of_ids.dtype == term.dtype
        np.testing.assert_array_equal(term_of_ids, np.take_along_axis(np.asarray(term), token_ids, axis=1))
        # No edit is idle here.
        assert (np.asarray(term) != np.asarray(term)[0, 0]).any()


@OPTIMIZED
def test_unused_cells_of_a_support_do_no_harm():
    """They hold vocab_size, which pads every list too."""
    rng = np.random.default_rng(5)
    V = 33
    params, prompts, outputs = everything(rng, V, 60)
    logits = rng.normal(size=(60, V)).astype(np.float32)
    counts = rng.integers(0, 10, 60)
    columns = np.stack([rng.permutation(V)[:9] for _ in range(60)]).astype(np.int32)
    is_used = np.arange(9) < counts[:, None]
    whole = edited(logits, params, prompts, outputs)
    kept = edited(logits, params, prompts, outputs, columns=np.where(is_used, columns, V).astype(np.int32))
    np.testing.assert_array_equal(kept[is_used], np.take_along_axis(whole, columns, axis=1)[is_used])
    assert not np.isnan(kept).any()
    assert not np.isposinf(kept).any()


def test_rows_without_an_allow_list_allow_any_id_asked_for():
    params = [SamplingParams(allowed_token_ids=[3, 1]), SamplingParams()]
    batch = SamplingBatch.from_params(params, vocab_size=4)
    terms = EditTerms.for_ids(batch, None, jnp.zeros(2, jnp.int32), jnp.array([[0, 1, 3], [0, 1, 3]], jnp.int32))
    assert terms.is_allowed.tolist() == [[False, True, True], [True, True, True]]


@OPTIMIZED
@pytest.mark.parametrize("num_columns", [5, 7])
def test_slices_of_the_terms_side_by_side_are_the_whole(num_columns):
    """33 ids in 8 slices: the last ones reach past the vocabulary, or lie beyond it."""
    V, devices = 33, jax.devices()
    batch, history, steps = everything_of(6, V, 12)
    mesh = jax.sharding.Mesh(np.array(devices), ("tensor",))
    part = shards.Slice(num_columns, ("tensor",), len(devices))
    assert len(devices) * num_columns > V
    of_slices = jax.shard_map(
        lambda batch, history, steps: EditTerms.for_vocabulary(batch, history, steps, part),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(None, "tensor"),
        check_vma=False,
    )
    whole = jax.tree.leaves(EditTerms.for_vocabulary(batch, history, steps))
    sliced = jax.tree.leaves(jax.jit(of_slices)(batch, history, steps))
    assert len(whole) == len(sliced) == 6
    for term, term_of_slices in zip(whole, sliced, strict=True):
        np.testing.assert_array_equal(term_of_slices[:, :V], term)


def test_edits_nobody_uses_touch_nothing():
    batch = SamplingBatch.from_params([SamplingParams()] * 2, vocab_size=4)
    terms = EditTerms.for_vocabulary(batch, None, jnp.zeros(2, jnp.int32))
    assert jax.tree.leaves(terms) == []
    logits = jnp.arange(8.0).reshape(2, 4)
    assert all(edit(logits, terms, batch) is logits for edit in EDITS)


def test_ids_outside_the_vocabulary_are_refused_or_dropped_never_wrapped():
    """P18, P14: -1 must not count as the last id."""
    batch = SamplingBatch.from_params([SamplingParams(frequency_penalty=1.0)], vocab_size=4)
    with pytest.raises(ValueError, match=r"history of row 0 holds ids \[-1\] outside \[0, 4\)"):
        History.from_lists([[]], [[2, -1]], batch)
    history = History.from_lists([[]], [[2]], batch).append(jnp.array([-1], jnp.int32), jnp.array([True]))
    assert history.output_counts.tolist() == [[0, 0, 1, 0]]
