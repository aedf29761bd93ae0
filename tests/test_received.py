"""What another engine sampled comes in whole, in every form alike, or is refused by the name of row and position."""

import copy
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmask import Finish, SamplingParams, rollout_from_csr, rollout_from_lists

V, T, W, EOS = 20, 6, 4, 2
NAN = float("nan")
SHAPES = {"vocab_size": V, "eos_token_ids": [EOS], "width": W, "max_prompt_length": 3, "max_length": T}


def example():
    """Two prompts with two completions each; row 1 called a tool, whose answer stands at positions 2 and 3."""
    return {
        "prompts": [[1, 3], [4]],
        "completions": [[5, 6, EOS], [7, EOS, 9, 9, 8], [10, 11], [12]],
        "logprobs": [[-0.5, 0.0, -0.25], [-1.0, -0.5, None, NAN, -2.0], [1e-4, -0.125], [-3.0]],
        "supports": [
            [[6, 5], [6], [EOS, 0]],
            [[7, 1, 3], [EOS, 9], None, None, [8, 19, 0, 4]],
            [[10], [11, 10]],
            [[0, 12, 13]],
        ],
        "params": [SamplingParams(temperature=0.5 + row / 4, top_p=0.9, seed=row) for row in range(4)],
        "group_size": 2,
    }


def as_csr(given):
    """The same with its supports in sparse rows."""
    given = dict(given)
    entries = list(itertools.chain.from_iterable(given.pop("supports")))
    counts = np.array([len(entry or ()) for entry in entries])
    token_ids = np.array([token_id for entry in entries for token_id in entry or ()], np.int64)
    return given, token_ids, counts


def in_every_form(given):
    """The rollout of lists, of offsets and of counts."""
    rest, token_ids, counts = as_csr(given)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return (
        rollout_from_lists(**given, **SHAPES),
        rollout_from_csr(**rest, token_ids=token_ids, offsets=offsets, **SHAPES),
        rollout_from_csr(**rest, token_ids=token_ids, counts=counts, **SHAPES),
    )


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


def changed(given, field, place, value):
    """A copy with one entry replaced: `place` is its path; () replaces the whole field."""
    given = copy.deepcopy(given)
    holder, path = given, (field, *place)
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    return given


def test_every_form_is_the_same_rollout():
    rollout, *others = in_every_form(example())
    for other in others:
        assert_equal(rollout, other)
    assert rollout.prompt_ids.tolist() == [[1, 3, 0], [4, 0, 0]]
    assert rollout.prompt_lengths.tolist() == [2, 1]
    assert rollout.token_ids.tolist() == [[5, 6, 2, 0, 0, 0], [7, 2, 9, 9, 8, 0], [10, 11, 0, 0, 0, 0], [12, *[0] * 5]]
    assert rollout.lengths.tolist() == [3, 5, 2, 1]
    expected = [[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
    assert rollout.loss_mask.tolist() == np.array(expected, bool).tolist()
    np.testing.assert_array_equal(rollout.sampled_mask, rollout.loss_mask)
    assert rollout.logprobs[1].tolist() == [-1.0, -0.5, 0.0, 0.0, -2.0, 0.0]
    assert rollout.support.to_lists()[:2] == [
        [[5, 6], [6], [0, 2], [], [], []],
        [[1, 3, 7], [2, 9], [], [], [0, 4, 8, 19], []],
    ]
    assert rollout.support.packed is None
    assert [Finish(code).name for code in rollout.finish.tolist()] == ["STOP", "LENGTH", "LENGTH", "LENGTH"]
    assert rollout.sampling.temperature.tolist() == [0.5, 0.75, 1.0, 1.25]
    assert (rollout.group_size, rollout.logprobs_mode) == (2, "processed_logprobs")
    assert rollout.policy_versions is None


def test_shapes_follow_the_data_where_nobody_sets_them():
    rollout = rollout_from_lists(**example(), vocab_size=V)
    assert (rollout.prompt_ids.shape, rollout.support.token_ids.shape) == ((2, 2), (4, 5, 4))
    narrow = rollout_from_lists(**example(), vocab_size=V, width=2)
    assert narrow.support.packed.shape == (4, 5, 3)
    assert narrow.support.to_lists() == rollout.support.to_lists()


@pytest.mark.usefixtures("unchecked")
def test_what_is_given_of_tokens_that_do_not_train_is_never_looked_at():
    clean = rollout_from_lists(**example(), **SHAPES)
    dirty = changed(example(), "loss_mask", (), [[True] * 3, [1, 1, 0, 0, 1], [True] * 2, [np.True_]])
    for place, logprob, support in ((2, "soon", [99, -1, 99]), (3, 10**400, "none")):
        dirty["logprobs"][1][place], dirty["supports"][1][place] = logprob, support
    jax.tree.map(np.testing.assert_array_equal, rollout_from_lists(**dirty, **SHAPES), clean)


def test_versions_of_the_policy():
    versions = [[3, 3, 4], [4, 4, None, 7, 5], [0, 0], [2**31 - 1]]
    rollout = rollout_from_lists(**example(), policy_versions=versions, **SHAPES)
    assert rollout.policy_versions[1].tolist() == [4, 4, -1, -1, 5, -1]
    assert rollout.policy_versions[3].tolist() == [2**31 - 1, -1, -1, -1, -1, -1]
    assert rollout.policy_versions.dtype == jnp.int32


@pytest.mark.usefixtures("unchecked")
def test_arrays_come_in_like_lists():
    arrays = copy.deepcopy(example())
    arrays["prompts"] = [np.array(row, np.uint16) for row in arrays["prompts"]]
    arrays["completions"] = [jnp.array(row, jnp.int32) for row in arrays["completions"]]
    arrays["logprobs"] = [np.array(row, np.float32) for row in arrays["logprobs"]]
    arrays["supports"][0] = tuple(np.array(ids) for ids in arrays["supports"][0])
    arrays["supports"][3] = np.array(arrays["supports"][3])
    assert_equal(rollout_from_lists(**arrays, **SHAPES), rollout_from_lists(**example(), **SHAPES))


def test_one_setting_for_all_rows():
    given = example() | {"params": SamplingParams(top_k=8, return_sampling_mask=False)}
    rollout = rollout_from_lists(**given, **SHAPES)
    assert rollout.sampling.top_k.tolist() == [8] * 4
    assert rollout.sampling.returns_support is None, "the supports are here, whoever asked for them"
    assert_equal(rollout, rollout_from_lists(**given, **SHAPES))


def row_of(completion, loss_mask=None, eos=EOS, **settings):
    """One completion whose supports hold the sampled id and the next."""
    supports = [[[token_id, token_id + 1] for token_id in completion]]
    return rollout_from_lists(
        [[1]],
        [completion],
        [[-0.5] * len(completion)],
        supports,
        params=SamplingParams(**settings),
        vocab_size=V,
        eos_token_ids=[eos],
        max_length=T,
        width=W,
        loss_mask=None if loss_mask is None else [[bool(flag) for flag in loss_mask]],
    )


@pytest.mark.parametrize(
    ("completion", "loss_mask", "length"),
    [
        ([5, 6, 2, 2, 2], None, 3),
        ([5, 6, 2, 2, 2], [1, 1, 1, 0, 0], 3),
        ([2, 2, 2], None, 1),
        ([5, 6, 2], None, 3),
        ([5, 6, 2, 3, 2], None, 3),
        # A tool's text ends with the id at which the policy then stops at once.
        ([5, 2, 2], [1, 0, 1], 3),
        ([5, 2, 2, 2], [1, 0, 1, 1], 3),
        # The end of a turn, a tool, the next turn.
        ([5, 2, 7, 8, 2, 2], [1, 1, 0, 1, 1, 1], 5),
        ([5, 6, 2, 2, 2], [1, 1, 0, 0, 0], 5),
    ],
)
def test_refilled_completions_end_at_their_stop_id(completion, loss_mask, length):
    """P48: ids after the first EOS were filled up with EOS."""
    rollout = row_of(completion, loss_mask, stop_token_ids=[3])
    assert rollout.lengths.tolist() == [length]
    expected = [1] * length if loss_mask is None else loss_mask[:length]
    assert rollout.loss_mask[0].astype(int).tolist() == expected + [0] * (T - length)
    assert rollout.token_ids[0].tolist() == completion[:length] + [0] * (T - length)
    assert rollout.support.counts[0].tolist() == [2 * flag for flag in expected] + [0] * (T - length)
    assert int(rollout.finish[0]) == (Finish.STOP if completion[length - 1] in (2, 3) else Finish.LENGTH)


def test_a_pad_id_that_is_the_stop_id_is_a_token_like_others():
    rollout = row_of([5, 0, 0, 0], eos=0)
    assert rollout.loss_mask[0].tolist() == [True, True, False, False, False, False]
    assert int(rollout.finish[0]) == Finish.STOP
    assert row_of([5, 0, 0, 0]).lengths.tolist() == [4]


def test_rows_that_ignore_the_stop_id_go_on():
    assert row_of([5, 2, 2, 7, 2, 2], ignore_eos=True).loss_mask.all()


@pytest.mark.parametrize(
    ("completion", "loss_mask", "message"),
    [
        ([5, 2, 7], None, "row 0, position 2: id 7 trains right behind the stop id 2, which ended the completion."),
        ([5, 2, 2, 7], None, "row 0, position 2: id 2 trains right behind the stop id 2, which ended the completion."),
        ([5, 2, 7, 2, 8], [1, 1, 0, 1, 1], "row 0, position 4: id 8 trains right behind the stop id 2, which ended"),
    ],
)
def test_nothing_trains_behind_the_end(completion, loss_mask, message):
    with pytest.raises(ValueError) as error:
        row_of(completion, loss_mask)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"presence_penalty": -0.1}, "presence_penalty"),
        ({"bad_words": [[3]]}, "bad_words"),
        ({"min_tokens": 1}, "min_tokens"),
    ],
)
def test_settings_that_look_back_over_tokens_of_others(settings, name):
    with pytest.raises(ValueError) as error:
        row_of([5, 6, 7, 8], [1, 0, 0, 1], **settings)
    assert str(error.value) == (
        f"row 0, position 3: {name} looks back at the output, and the token at position 1 was put in by others: what "
        f"the engine counted as output is not known."
    )
    # Behind everything that trains, others change nothing.
    assert row_of([5, 6, 7, 8], [1, 1, 0, 0], **settings).sampling.is_edited


def test_settings_that_do_not_look_back():
    assert row_of([5, 6, 7], [1, 0, 1], logit_bias={3: 1.0}, allowed_token_ids=range(5, 9)).sampling.is_edited


REFUSED = [
    # field, place, value, message; those marked True read the same of sparse rows.
    ("completions", (1, 4), 20, True, "completion of row 1, position 4 holds ids [20] outside [0, 20)."),
    ("completions", (1, 2), -1, True, "completion of row 1, position 2 holds ids [-1] outside [0, 20)."),
    ("completions", (1, 2), 2**70, True, f"completion of row 1, position 2 holds ids [{2**70}] outside [0, 20)."),
    ("completions", (3, 0), 1.0, True, "each id of row 3, position 0 must be an integer, got float 1.0."),
    ("completions", (3, 0), True, True, "each id of row 3, position 0 must be an integer, got bool True."),
    ("completions", (2,), 5, True, "completion of row 2 must be a list, got 5."),
    ("completions", (), [[5]] * 3, True, "supports must have one list per completion, 3, got 4."),
    ("group_size", (), 3, True, "completions must be 2 prompts * group_size 3 = 6, got 4."),
    ("group_size", (), 0, True, "group_size must be at least 1, got 0."),
    ("prompts", (1,), [], True, "prompts must be at least one, and each hold at least one id, but that of group 1 is"),
    ("prompts", (), [], True, "prompts must be at least one, and each hold at least one id, but there is none."),
    ("prompts", (0, 1), 20, True, "prompt of group 0, position 1 holds ids [20] outside [0, 20)."),
    ("prompts", (0,), [1] * 4, True, "group 0: 4 tokens are more than max_prompt_length=3."),
    ("params", (2,), SamplingParams(n=2), True, "row 2: params must have n=1, one completion each, got n=2."),
    ("params", (), [SamplingParams()] * 3, True, "params must be one, or one per completion, 4, got 3."),
    ("params", (3,), SamplingParams(temperature=0.0), True, "row 3: sampling distribution replay requires temperature"),
    ("logprobs", (1, 4), NAN, True, "row 1, position 4: logprob must be a finite number of at most 0.001, got nan."),
    ("logprobs", (0, 2), None, True, "row 0, position 2: logprob must be a finite number of at most 0.001, got None."),
    ("logprobs", (0, 1), -np.inf, True, "row 0, position 1: logprob must be a finite number of at most 0.001, got -i"),
    ("logprobs", (2, 1), 0.002, True, "row 2, position 1: logprob must be a finite number of at most 0.001, got 0.002"),
    ("logprobs", (2, 1), "0", True, "row 2, position 1: logprob must be a finite number of at most 0.001, got '0'."),
    ("logprobs", (0, 1), -0.002, True, "row 0, position 1: the only id of a support has log-probability 0, got -0.002"),
    ("params", (2,), SamplingParams(top_k=5, allowed_token_ids=[2]), True, "row 2, position 0: id 10 of the support"),
    ("logprobs", (2,), [-1.0], True, "row 2: logprobs must have one entry per token of the completion, 2, got 1."),
    ("logprobs", (), [], True, "logprobs must have one list per completion, 4, got 0."),
    ("policy_versions", (), [[0] * 3, [0] * 4, [0], [0]], True, "row 1: policy_versions must have one entry per token"),
    ("policy_versions", (), [[0] * 3, [0] * 5, [0, -1], [0]], True, "row 2, position 1: policy version must be an int"),
    ("loss_mask", (), [[1] * 3, [1] * 5, [1, 1], [1]], True, "row 1, position 2: the token trains, but its support is"),
    ("loss_mask", (), [[1] * 3, [1] * 5, [1, 2], [1]], True, "row 2, position 1: loss_mask must be True or False, got"),
    ("loss_mask", (), [[1] * 3, [1] * 5, [1], [1]], True, "row 2: loss_mask must have one entry per token of the comp"),
    ("supports", (1, 4), [3, 20, -1], True, "support of row 1, position 4 holds ids [-1, 20] outside [0, 20)."),
    ("supports", (1, 4), [3, 8, 3], True, "support of row 1, position 4 repeats ids [3]."),
    ("supports", (1, 4), [3, 7], True, "row 1, position 4: sampled id 8 lies outside its support [3, 7]."),
    ("supports", (2, 0), list(range(9, -1, -1)), True, "row 2, position 0: sampled id 10 lies outside its support [0, "
     "1, 2, 3, 4, 5, 6, 7, ...]."),
    ("supports", (3,), [None], True, "row 3: no token has a support; where none is meant to train, say so with loss_m"),
    ("supports", (3,), None, False, "row 3: no token has a support; where none is meant to train, say so with loss_m"),
    ("supports", (2,), [[10]], False, "row 2: supports must have one entry per token of the completion, 2, got 1."),
    ("supports", (), [None] * 5, False, "supports must have one list per completion, 4, got 5."),
    ("supports", (1, 4), [], False, "row 1, position 4: the token trains, but its support is empty."),
    ("supports", (1, 4), [8, 1.5], False, "each id of row 1, position 4 must be an integer, got float 1.5."),
    ("supports", (1, 4), 8, False, "support of row 1, position 4 must be a list of ids, got 8."),
]  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("field", "place", "value", "has_sparse", "message"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(field, place, value, has_sparse, message):
    wrong = changed(example() | {"loss_mask": None, "policy_versions": None}, field, place, value)
    with pytest.raises(ValueError) as error:
        rollout_from_lists(**wrong, **SHAPES)
    assert str(error.value).startswith(message)
    if has_sparse and not message.startswith("supports must"):
        rest, token_ids, counts = as_csr(wrong)
        with pytest.raises(ValueError) as error:
            rollout_from_csr(**rest, token_ids=token_ids, counts=counts, **SHAPES)
        assert str(error.value).startswith(message)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({}, "supports need exactly one of offsets and counts."),
        ({"offsets": [0] * 12, "counts": [0] * 11}, "supports need exactly one of offsets and counts."),
        ({"offsets": [0, 4, 20]}, "supports must be as many as the completions have tokens, 11, got 2."),
        ({"offsets": [0, 20, 4]}, "offsets must never decrease, got 20 then 4 at row 1."),
        ({"counts": [20] * 3}, "supports must be as many as the completions have tokens, 11, got 3."),
        ({"counts": [2, 1, 2, -1, *[0] * 7]}, "row 1, position 0: count must be in [0, 20], got -1."),
        ({"counts": [2, 1, 2, 3, *[0] * 7]}, "counts must sum to the number of token_ids, 20, got 8."),
        ({"counts": [1.0] * 11}, "counts must be integers, got float64."),
        ({"counts": [0] * 11, "token_ids": [0.5]}, "token_ids must be integers, got float64."),
    ],
)
def test_sparse_rows_that_are_none(rows, message):
    rest, token_ids, _ = as_csr(example())
    with pytest.raises(ValueError) as error:
        rollout_from_csr(**rest | {"token_ids": token_ids} | rows, **SHAPES)
    assert str(error.value) == message


def test_supports_that_got_lost_are_noticed():
    """P28: masks came back as null, and the request still succeeded."""
    lost = example() | {"supports": [None] * 4}
    with pytest.raises(ValueError, match=r"^row 0: no token has a support"):
        rollout_from_lists(**lost, **SHAPES)
    with pytest.raises(ValueError, match=r"^row 0, position 0: the token trains, but its support is missing"):
        rollout_from_lists(**lost, loss_mask=[[True] * len(row) for row in lost["completions"]], **SHAPES)
    said_so = rollout_from_lists(**lost, loss_mask=[[False] * len(row) for row in lost["completions"]], **SHAPES)
    assert not said_so.loss_mask.any()
    assert said_so.lengths.tolist() == [3, 5, 2, 1], "context is context"
    assert not said_so.support.counts.any()


def test_completions_without_a_token():
    rollout = rollout_from_lists([[1]], [[]], [[]], [[]], params=SamplingParams(), vocab_size=V)
    assert (rollout.token_ids.shape, rollout.lengths.tolist(), rollout.finish.tolist()) == ((1, 1), [0], [2])


def test_too_many_tokens_for_the_width():
    with pytest.raises(ValueError, match=r"^row 1: 5 tokens are more than max_length=4\.$"):
        rollout_from_lists(**example(), **SHAPES | {"max_length": 4})


def random_rollout(seed):
    """Valid lists of fixed padded shape: four completions, turns of others in between, some refilled with EOS."""
    rng = np.random.default_rng(seed)
    given = example() | {"completions": [], "logprobs": [], "supports": []}
    for _ in range(4):
        length = int(rng.integers(1, T + 1))
        ids = rng.choice([i for i in range(V) if i != EOS], length)
        trains = rng.random(length) < 0.7
        trains[rng.integers(length)] = True
        others = [rng.permutation(np.setdiff1d(np.arange(V), [i]))[: rng.integers(W)].tolist() for i in ids]
        given["completions"].append(ids.tolist())
        # Over one id it is 0.
        given["logprobs"].append(
            [(float(-rng.random()) if o else 0.0) if one else None for one, o in zip(trains, others, strict=True)]
        )
        given["supports"].append([[*o, int(i)] if one else None for i, o, one in zip(ids, others, trains, strict=True)])
    return given, rng


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_valid_rollouts_survive(seed):
    given, _ = random_rollout(seed)
    rollout, *others = in_every_form(given)
    for other in others:
        assert_equal(rollout, other)
    supports = rollout.support.to_lists()
    for row, (ids, logprobs, kept) in enumerate(
        zip(given["completions"], given["logprobs"], given["supports"], strict=True)
    ):
        padding = T - len(ids)
        assert rollout.token_ids[row].tolist() == ids + [0] * padding
        assert rollout.sampled_mask[row].tolist() == [one is not None for one in kept] + [False] * padding
        np.testing.assert_array_equal(rollout.logprobs[row], np.float32([v or 0.0 for v in logprobs] + [0] * padding))
        assert supports[row] == [sorted(one or []) for one in kept] + [[]] * padding


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["lacks", "outside", "twice", "nan", "high", "lost", "behind"]))
def test_one_wrong_entry_is_refused_where_it_stands(seed, kind):
    given, rng = random_rollout(seed)
    places = [(r, p) for r, row in enumerate(given["supports"]) for p, one in enumerate(row) if one is not None]
    row, position = places[rng.integers(len(places))]
    support, sampled = given["supports"][row][position], given["completions"][row][position]
    loss_mask = [[one is not None for one in row] for row in given["supports"]]
    if kind == "lacks":
        given["supports"][row][position] = [(sampled + 1) % V]
    elif kind == "outside":
        support.insert(0, int(rng.choice([-1, V, 2**40])))
    elif kind == "twice":
        support.append(support[0])
    elif kind == "nan":
        given["logprobs"][row][position] = NAN
    elif kind == "high":
        given["logprobs"][row][position] = 0.01
    elif kind == "lost":
        given["supports"][row][position] = None
    elif position == 0 or not loss_mask[row][position - 1]:
        return
    else:
        given["completions"][row][position - 1] = EOS
    rest, token_ids, counts = as_csr(given)
    for receive in (
        lambda: rollout_from_lists(**given, loss_mask=loss_mask, **SHAPES),
        lambda: rollout_from_csr(**rest, token_ids=token_ids, counts=counts, loss_mask=loss_mask, **SHAPES),
    ):
        with pytest.raises(ValueError, match=f"row {row}, position {position}\\b"):
            receive()


@pytest.mark.parametrize("value", [None, 1, "12", 1.5])
@pytest.mark.parametrize("field", ["prompts", "completions", "logprobs", "supports", "loss_mask", "policy_versions"])
def test_what_is_no_list_is_named(field, value, unchecked):
    given = {
        "prompts": [[1]],
        "completions": [[2, 3]],
        "logprobs": [[0.0, 0.0]],
        "supports": [[[2], [3]]],
        "loss_mask": [[True, True]],
        "policy_versions": [[0, 0]],
    }
    if value is None and field in ("loss_mask", "policy_versions"):
        return
    with pytest.raises(ValueError, match=f"{field} must be a list, got {value!r}"):
        rollout_from_lists(**{**given, field: value}, params=SamplingParams(top_k=5), vocab_size=9)
