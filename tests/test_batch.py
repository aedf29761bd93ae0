import dataclasses

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import oracle
import pytest
import tolerances

from jaxmask import History, SamplingBatch, SamplingParams
from jaxmask.edits import EditTerms, apply_edits

V = 8


@pytest.fixture
def unchecked():
    """Callers may pass anything; the type checks of the test run would refuse it before ours see it."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def batch_of(*params: SamplingParams, **options) -> SamplingBatch:
    return SamplingBatch.from_params(list(params), vocab_size=V, **options)


def seeds_of(batch: SamplingBatch) -> list[int]:
    return [int(low) + (int(high) << 32) for low, high in np.asarray(batch.seeds)]


@pytest.mark.parametrize(
    ("settings", "field", "outside"),
    [
        ({"logit_bias": {"8": 5.0}}, "logit_bias", [8]),
        ({"logit_bias": {"191222": -100.0, "3": 1.0}}, "logit_bias", [191222]),
        ({"logit_bias": {"-1": 1.0}}, "logit_bias", [-1]),
        ({"stop_token_ids": [0, 8, -1]}, "stop_token_ids", [8, -1]),
        ({"allowed_token_ids": [7, 8]}, "allowed_token_ids", [8]),
        ({"bad_words": [[1], [2, -3]]}, "bad_words", [-3]),
    ],
)
def test_ids_outside_the_vocabulary(settings, field, outside):
    """P13, P14: they would be clamped, wrapped or dropped on the device."""
    with pytest.raises(ValueError) as error:
        batch_of(SamplingParams(), SamplingParams(**settings))
    assert str(error.value) == (
        f"token_id(s) {outside} in {field} contain out-of-vocab token ids. Vocabulary size: {V}"
    )


def test_an_error_names_the_first_of_many_ids():
    with pytest.raises(ValueError) as error:
        batch_of(SamplingParams(stop_token_ids=[*range(8, 100_000)]))
    assert "15, 16" in str(error.value)
    assert ", 23] and 99976 more in stop_token_ids contain" in str(error.value)
    assert len(str(error.value)) < 300


def test_eos_ids_are_checked_too():
    with pytest.raises(ValueError, match=r"token_id\(s\) \[8\] in eos_token_ids contain out-of-vocab"):
        batch_of(SamplingParams(), eos_token_ids=[2, 8])


def test_the_last_id_is_inside():
    batch = batch_of(SamplingParams(logit_bias={7: 1.0}, stop_token_ids=[7], allowed_token_ids=[7], bad_words=[[7]]))
    for field in (batch.logit_bias_ids, batch.stop_token_ids, batch.allowed_token_ids, batch.bad_words):
        assert (np.asarray(field) == 7).any()


def test_bad_words_as_text_need_a_tokenizer():
    with pytest.raises(ValueError, match=r"bad_words given as text need a tokenizer; .* got 'no'"):
        batch_of(SamplingParams(bad_words=[[1], "no"]))


def test_no_requests():
    with pytest.raises(ValueError, match="params must hold at least one SamplingParams"):
        batch_of()


def test_one_request_needs_no_list():
    one = SamplingBatch.from_params(SamplingParams(n=2, seed=5, top_k=3), vocab_size=V)
    assert seeds_of(one) == [5, 6]
    assert one.num_rows == 2


def test_n_rows_per_request_with_consecutive_seeds():
    batch = batch_of(SamplingParams(n=3, seed=10, top_k=2), SamplingParams(seed=7, top_k=4))
    assert seeds_of(batch) == [10, 11, 12, 7]
    assert batch.top_k.tolist() == [2, 2, 2, 4]


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        pytest.param(2**32 - 1, [2**32 - 1, 2**32, 2**32 + 1], id="carry into the high word"),
        pytest.param(2**64 - 2, [2**64 - 2, 2**64 - 1, 0], id="wrap at 2^64"),
        pytest.param(-2, [2**64 - 2, 2**64 - 1, 0], id="negative seeds are two's complement"),
    ],
)
def test_seeds_are_64_bit(seed, expected):
    assert seeds_of(batch_of(SamplingParams(n=3, seed=seed))) == expected
    assert seeds_of(batch_of(SamplingParams(seed=seed)).repeat(3)) == expected


def test_rows_without_a_seed_draw_one_each():
    seeds = seeds_of(batch_of(SamplingParams(), SamplingParams(seed=-1), SamplingParams()))
    assert len(set(seeds)) == 3
    drawn = seeds_of(batch_of(SamplingParams(n=2)))
    assert drawn[1] == (drawn[0] + 1) % 2**64


def test_filters_that_are_off_have_neutral_values():
    batch = batch_of(
        SamplingParams(top_k=0),
        SamplingParams(top_k=-1),
        SamplingParams(top_k=5),
        SamplingParams(top_k=8),
        SamplingParams(top_k=10**12),
        SamplingParams(temperature=0.0, top_k=2, top_p=0.5, min_p=0.5),
    )
    assert batch.top_k.tolist() == [V, V, 5, V, V, V]
    assert batch.top_p.tolist() == [1.0] * 6
    assert batch.min_p.tolist() == [0.0] * 6
    assert batch.temperature.tolist() == [1.0] * 5 + [0.0]


OPTIONAL = {
    "min_tokens": {"min_tokens": 1},
    "withheld_token_ids": {"min_tokens": 1},
    "allowed_token_ids": {"allowed_token_ids": [1]},
    "logit_bias_ids": {"logit_bias": {1: 1.0}},
    "logit_bias_values": {"logit_bias": {1: 1.0}},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "presence_penalty": {"presence_penalty": 0.5},
    "bad_words": {"bad_words": [[1]]},
    "returns_support": {"return_sampling_mask": False},
}


def test_edits_nobody_uses_are_none():
    plain = batch_of(SamplingParams(), SamplingParams(top_k=3, temperature=0.5, return_sampling_mask=True))
    assert all(getattr(plain, field) is None for field in OPTIONAL)
    assert not plain.needs_history


@pytest.mark.parametrize(("field", "settings"), OPTIONAL.items())
def test_one_user_makes_an_edit_an_array(field, settings):
    batch = batch_of(SamplingParams(), SamplingParams(**settings))
    same_request = {other for other, need in OPTIONAL.items() if need == settings}
    assert {other for other in OPTIONAL if getattr(batch, other) is not None} == same_request
    neutral = {"repetition_penalty": 1.0, "returns_support": True, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    neutral |= {"min_tokens": 0, "logit_bias_values": 0.0}
    assert (np.asarray(getattr(batch, field))[0] == neutral.get(field, V)).all()
    looks_back = {"repetition_penalty", "frequency_penalty", "presence_penalty", "bad_words"}
    assert batch.needs_history == (field in looks_back)
    assert batch.has_penalties == (field in looks_back - {"bad_words"})


def test_stop_ids_and_withheld_ids():
    """P21: ignoring EOS leaves the user's own stop ids; P20: min_tokens withholds EOS and stop ids alike."""
    batch = batch_of(
        SamplingParams(stop_token_ids=[4], min_tokens=2),
        SamplingParams(stop_token_ids=[5], ignore_eos=True),
        SamplingParams(ignore_eos=True),
        eos_token_ids=(2, 3),
    )
    stops = [sorted(i for i in row if i < V) for row in np.asarray(batch.stop_token_ids).tolist()]
    assert stops == [[2, 3, 4], [5], []]
    withheld = [sorted(i for i in row if i < V) for row in np.asarray(batch.withheld_token_ids).tolist()]
    assert withheld == [[2, 3, 4], [], []]
    assert batch.min_tokens.tolist() == [2, 0, 0]


def test_no_limit_is_larger_than_any_limit():
    assert batch_of(SamplingParams(max_tokens=None), SamplingParams(max_tokens=7)).max_tokens.tolist() == [2**31 - 1, 7]


def test_lists_are_padded_to_powers_of_two_with_an_id_no_token_has():
    def widths(count):
        ids = list(range(count))
        batch = batch_of(
            SamplingParams(stop_token_ids=ids, allowed_token_ids=ids, logit_bias=dict.fromkeys(ids, 1.0)),
            SamplingParams(),
        )
        assert np.asarray(batch.stop_token_ids)[0].tolist() == ids + [V] * (batch.stop_token_ids.shape[1] - count)
        return {x.shape[1] for x in (batch.stop_token_ids, batch.allowed_token_ids, batch.logit_bias_ids)}

    assert [widths(count) for count in range(1, 9)] == [{1}, {2}, {4}, {4}, {8}, {8}, {8}, {8}]


def test_bad_words_are_right_aligned():
    batch = batch_of(SamplingParams(bad_words=[[1], [2, 3, 4], [5, 6]]), SamplingParams())
    assert batch.bad_words.tolist() == [
        [[V, V, V, 1], [V, 2, 3, 4], [V, V, 5, 6], [V, V, V, V]],
        [[V, V, V, V]] * 4,
    ]


def test_the_promised_bound_is_checked():
    fits = SamplingParams(top_k=4)
    assert batch_of(fits, SamplingParams(return_sampling_mask=False), support_bound=4).support_bound == 4
    for wide in (SamplingParams(top_k=5), SamplingParams(top_k=0), SamplingParams(temperature=0.0, top_k=1)):
        with pytest.raises(ValueError, match=r"top_k must be in \[1, 4\] and temperature > 0 .* got top_k="):
            batch_of(fits, wide, support_bound=4)


def test_repeat_copies_every_setting_and_steps_the_seed():
    batch = batch_of(
        SamplingParams(seed=100, top_k=3, logit_bias={1: 2.0}, bad_words=[[1, 2]]),
        SamplingParams(seed=2**32 - 2, temperature=0.5, return_sampling_mask=False),
    )
    repeated = batch.repeat(3)
    assert seeds_of(repeated) == [100, 101, 102, 2**32 - 2, 2**32 - 1, 2**32]
    assert repeated.num_rows == 6
    for before, after in zip(jax.tree.leaves(batch)[1:], jax.tree.leaves(repeated)[1:], strict=True):
        np.testing.assert_array_equal(np.repeat(np.asarray(before), 3, axis=0), after)
    assert jax.tree.structure(batch) == jax.tree.structure(repeated)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 5.5}, "vocab_size must be an integer, got float 5.5."),
        ({"vocab_size": True}, "vocab_size must be an integer, got bool True."),
        ({"vocab_size": None}, "vocab_size must be an integer, got NoneType None."),
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0."),
        ({"vocab_size": -3}, "vocab_size must be at least 1, got -3."),
        ({"eos_token_ids": None}, "eos_token_ids must contain only integers, got None."),
        ({"eos_token_ids": 2}, "eos_token_ids must contain only integers, got 2."),
        ({"eos_token_ids": [2, 1.5]}, "eos_token_ids must contain only integers, got [2, 1.5]."),
        ({"eos_token_ids": [True]}, "eos_token_ids must contain only integers, got [True]."),
        ({"eos_token_ids": "2"}, "eos_token_ids must contain only integers, got '2'."),
        ({"support_bound": 0}, "support_bound must be at least 1, got 0."),
        ({"support_bound": 2.0}, "support_bound must be an integer, got float 2.0."),
        ({"params": None}, "params must be SamplingParams or a sequence of them, got None."),
        ({"params": 5}, "params must be SamplingParams or a sequence of them, got 5."),
        ({"params": [SamplingParams(), None]}, "params must hold nothing but SamplingParams, got None at index 1."),
        ({"params": [{"n": 1}]}, "params must hold nothing but SamplingParams, got {'n': 1} at index 0."),
        ({"params": ()}, "params must hold at least one SamplingParams, got none."),
    ],
)
def test_wrong_types_are_named(settings, message):
    """P62: not a TypeError from deep inside, nor a rounded number."""
    settings = {"params": [SamplingParams(top_k=1)], "vocab_size": V} | settings
    with pytest.raises(ValueError) as error:
        SamplingBatch.from_params(settings.pop("params"), **settings)
    assert str(error.value) == message


@pytest.mark.usefixtures("unchecked")
def test_sizes_from_numpy_are_plain_numbers():
    """They are static: two equal batches must share one program."""
    plain, other = (
        SamplingBatch.from_params(
            SamplingParams(seed=1, top_k=2), vocab_size=kind(V), support_bound=kind(2), eos_token_ids=[kind(3)]
        )
        for kind in (int, np.int64)
    )
    assert (type(other.vocab_size), type(other.support_bound)) == (int, int)
    assert jax.tree.structure(plain) == jax.tree.structure(other)
    assert other.stop_token_ids.tolist() == [[3]]


EVERYTHING = SamplingParams(
    n=2,
    seed=3,
    min_tokens=4,
    stop_token_ids=[1, 2, 3],
    allowed_token_ids=[0, 1, 2, 3, 4],
    logit_bias={1: 1.0, 2: -3.0},
    repetition_penalty=1.5,
    frequency_penalty=0.5,
    presence_penalty=-0.5,
    bad_words=[[1], [2, 3, 4], [5, 6]],
    return_sampling_mask=False,
)


def shapes_of(batch: SamplingBatch) -> dict[str, tuple[int, ...]]:
    """Shapes past the row axis of every array that is there."""
    values = ((field.name, getattr(batch, field.name)) for field in dataclasses.fields(batch))
    return {name: value.shape[1:] for name, value in values if hasattr(value, "shape")}


def test_a_plain_batch_like_one_with_everything_is_neutral():
    before = batch_of(EVERYTHING, eos_token_ids=(7,))
    batch = batch_of(SamplingParams(seed=5), SamplingParams(top_k=3), SamplingParams(), like=before, eos_token_ids=(7,))
    assert shapes_of(batch) == shapes_of(before)
    assert shapes_of(batch).keys() >= OPTIONAL.keys()
    assert batch.num_rows == 3
    assert batch.stop_token_ids.tolist() == [[7, V, V, V]] * 3
    assert batch.min_tokens.tolist() == [0] * 3
    assert batch.withheld_token_ids.tolist() == [[V] * 4] * 3
    assert batch.allowed_token_ids.tolist() == [[V] * 8] * 3
    assert batch.logit_bias_ids.tolist() == [[V] * 2] * 3
    assert batch.logit_bias_values.tolist() == [[0.0] * 2] * 3
    assert batch.repetition_penalty.tolist() == [1.0] * 3
    assert batch.frequency_penalty.tolist() == [0.0] * 3
    assert batch.presence_penalty.tolist() == [0.0] * 3
    assert batch.bad_words.tolist() == [[[V] * 4] * 4] * 3
    assert batch.returns_support.tolist() == [True] * 3
    dtypes = {name: getattr(before, name).dtype for name in shapes_of(before)}
    assert {name: getattr(batch, name).dtype for name in shapes_of(batch)} == dtypes


@pytest.mark.parametrize(("field", "settings"), OPTIONAL.items())
def test_like_keeps_the_fields_that_were_there_and_no_others(field, settings):
    before = batch_of(SamplingParams(**settings))
    after = batch_of(SamplingParams(), like=before)
    assert field in shapes_of(after)
    assert shapes_of(after) == shapes_of(before)
    both = batch_of(SamplingParams(presence_penalty=1.0), like=before)
    assert shapes_of(both) == shapes_of(before) | {"presence_penalty": ()}


def test_lists_grow_beyond_like_and_words_keep_their_right_end():
    before = batch_of(SamplingParams(stop_token_ids=[1, 2, 3], bad_words=[[1, 2, 3], [4]]))
    assert shapes_of(before)["bad_words"] == (2, 4)
    after = batch_of(SamplingParams(stop_token_ids=[1, 2, 3, 4, 5], bad_words=[[1], [2, 3], [5]]), like=before)
    assert after.stop_token_ids.tolist() == [[1, 2, 3, 4, 5, V, V, V]]
    assert after.bad_words.tolist() == [[[V, V, V, 1], [V, V, 2, 3], [V, V, V, 5], [V, V, V, V]]]
    # A list that is no power of two wide stays as wide as it was.
    odd = dataclasses.replace(before, stop_token_ids=jnp.full((1, 3), V, jnp.int32))
    assert batch_of(SamplingParams(stop_token_ids=[6]), like=odd).stop_token_ids.tolist() == [[6, V, V]]


def test_repeated_rows_are_as_good_a_likeness():
    before = batch_of(EVERYTHING)
    assert shapes_of(batch_of(SamplingParams(), like=before.repeat(3))) == shapes_of(before)


def test_like_has_the_same_vocabulary():
    before = SamplingBatch.from_params(SamplingParams(), vocab_size=V + 1)
    with pytest.raises(ValueError, match=r"^like must have vocab_size 8, got 9\.$"):
        batch_of(SamplingParams(), like=before)


def random_request(rng: np.random.Generator) -> SamplingParams:
    """Each edit with probability one third, lists of any length up to those of LARGEST."""

    def ids(most):
        return rng.choice(V, rng.integers(1, most + 1), replace=False).tolist()

    edits = {
        "stop_token_ids": ids(4),
        "min_tokens": int(rng.integers(1, 6)),
        "allowed_token_ids": ids(8),
        "logit_bias": {token_id: float(rng.normal()) for token_id in ids(4)},
        "repetition_penalty": float(rng.uniform(0.5, 2)),
        "frequency_penalty": float(rng.uniform(-1, 1)),
        "presence_penalty": float(rng.uniform(-1, 1)),
        "bad_words": [rng.integers(0, V, rng.integers(1, 4)).tolist() for _ in range(rng.integers(1, 5))],
        "return_sampling_mask": False,
    }
    used = {name: value for name, value in edits.items() if rng.random() < 1 / 3}
    return SamplingParams(seed=int(rng.integers(2**32)), **used)


LARGEST = SamplingParams(
    stop_token_ids=[0, 1, 2, 3],
    min_tokens=2,
    allowed_token_ids=list(range(8)),
    logit_bias=dict.fromkeys(range(4), 1.0),
    repetition_penalty=2.0,
    frequency_penalty=1.0,
    presence_penalty=1.0,
    bad_words=[[1, 2, 3]] * 4,
    return_sampling_mask=False,
)


def test_after_the_largest_batch_all_share_one_program():
    """Thirty batches, each like the one before: one structure, one set of shapes, and every row as its own batch."""
    rng = np.random.default_rng(0)

    @jax.jit
    def edited(logits, batch, history, steps):
        return apply_edits(logits, EditTerms.for_vocabulary(batch, history, steps), batch)

    batch = first = batch_of(LARGEST, *[SamplingParams()] * 3, eos_token_ids=(7,))
    num_edits = set()
    for _ in range(30):
        requests = [random_request(rng) for _ in range(4)]
        alone = batch_of(*requests, eos_token_ids=(7,))
        num_edits.add(len(shapes_of(alone)))
        batch = batch_of(*requests, eos_token_ids=(7,), like=batch)
        assert jax.tree.structure(batch) == jax.tree.structure(first)
        assert [leaf.shape for leaf in jax.tree.leaves(batch)] == [leaf.shape for leaf in jax.tree.leaves(first)]

        logits = rng.normal(size=(4, V)).astype(np.float32)
        prompts = [rng.integers(0, V, 3).tolist() for _ in requests]
        outputs = [rng.integers(0, V, 4).tolist() for _ in requests]
        history = History.from_lists(prompts, outputs, batch)
        values = edited(jnp.asarray(logits), batch, history, jnp.full(4, 4, jnp.int32))
        rows = zip(logits, requests, prompts, outputs, strict=True)
        expected = [oracle.edit(row, p, prompt=i, output=o, eos=(7,)) for row, p, i, o in rows]
        np.testing.assert_allclose(values, np.stack(expected), rtol=tolerances.EDIT, atol=tolerances.EDIT)
    assert edited._cache_size() == 1
    assert len(num_edits) > 1, "without `like` these batches differ"


def test_shapes_only_grow():
    rng = np.random.default_rng(1)
    batch, seen = None, []
    for _ in range(30):
        previous = {} if batch is None else shapes_of(batch)
        batch = batch_of(random_request(rng), like=batch)
        shapes = shapes_of(batch)
        assert all(np.all(np.array(shapes[name]) >= size) for name, size in previous.items())
        seen += [shapes] if shapes not in seen else []
    assert 1 < len(seen) < 15
    assert shapes_of(batch) == shapes_of(batch_of(LARGEST)) | {"stop_token_ids": (4,)}


def test_rows_of_padding_forbid_nothing():
    """Neutral edits leave every logit as it is, bit for bit, whatever was generated: also nothing, and id 0."""
    requests = [SamplingParams()] * 3
    batch = batch_of(*requests, like=batch_of(EVERYTHING, eos_token_ids=(7,)), eos_token_ids=(7,))
    logits = np.random.default_rng(0).normal(size=(3, V)).astype(np.float32)
    logits[:, 2] = -np.inf
    history = History.from_lists([[0], [1, 2], [7]], [[], [0, 0, 0, 0], [1, 2, 3]], batch)
    terms = EditTerms.for_vocabulary(batch, history, jnp.array([0, 4, 3], jnp.int32))
    assert terms.ends_bad_word.shape == (3, V)
    assert not terms.ends_bad_word.any()
    np.testing.assert_array_equal(apply_edits(jnp.asarray(logits), terms, batch), logits)
    # The same table does forbid where a row has words.
    mixed = batch_of(SamplingParams(bad_words=[[3]]), SamplingParams(), SamplingParams(bad_words=[[2, 3, 4]]))
    history = History.from_lists([[0], [1, 2], [7]], [[], [0, 0, 0, 0], [1, 2, 3]], mixed)
    terms = EditTerms.for_vocabulary(mixed, history, jnp.array([0, 4, 3], jnp.int32))
    assert [np.flatnonzero(row).tolist() for row in np.asarray(terms.ends_bad_word)] == [[3], [], [4]]
