import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances
from mock_model import Mock, V, fixed_model, random_model

from jaxmask import Finish, Rollout, SamplingBatch, SamplingParams, generate, masked_log_probs
from jaxmask.generate import Model

PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5], [3]]


def run(model, params, prompts=PROMPTS, *, max_new_tokens=8, width=8, eos=(), pad_prompt=0, **options) -> Rollout:
    width_of_prompts = max(map(len, prompts))
    prompt_ids = np.full((len(prompts), width_of_prompts), pad_prompt, np.int32)
    for row, prompt in zip(prompt_ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    requests = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    batch = SamplingBatch.from_params(requests, vocab_size=model.table.shape[1], eos_token_ids=eos)
    lengths = jnp.asarray(np.array([len(prompt) for prompt in prompts], np.int32))
    return generate(
        model, batch, jnp.asarray(prompt_ids), lengths, max_new_tokens=max_new_tokens, width=width, **options
    )


def completions(rollout) -> list[list[int]]:
    return [ids[:length] for ids, length in zip(rollout.token_ids.tolist(), rollout.lengths.tolist(), strict=True)]


def assert_consistent(rollout: Rollout, model: Mock, params: list[SamplingParams], eos=()) -> None:
    """Every recorded token against the model's own logits after the same prefix: support, log-probability, padding."""
    supports = rollout.support.to_lists()
    width = rollout.support.width
    for row, generated in enumerate(completions(rollout)):
        index = row // rollout.group_size
        prompt = rollout.prompt_ids[index, : int(rollout.prompt_lengths[index])].tolist()
        for step, token in enumerate(generated):
            output = generated[:step]
            edited = oracle.edit(model.logits(prompt + output), params[row], prompt=prompt, output=output, eos=eos)
            truth = oracle.truth(edited[None], [params[row]])
            assert truth.is_exact.all()
            ids = np.flatnonzero(truth.keep()[0]).tolist()
            assert supports[row][step] == ids
            assert token in ids
            lp = oracle.log_probs(truth.z, truth.keep())[0, token]
            assert float(rollout.logprobs[row, step]) == pytest.approx(lp, abs=tolerances.LOGPROB)
        assert not np.asarray(rollout.logprobs)[row, len(generated) :].any()
        assert supports[row][len(generated) :] == [[]] * (rollout.token_ids.shape[1] - len(generated))
        assert (np.asarray(rollout.support.token_ids)[row, len(generated) :] == rollout.support.vocab_size).all()
    assert rollout.support.token_ids.shape == (*rollout.token_ids.shape, width)
    np.testing.assert_array_equal(rollout.loss_mask.sum(axis=1), rollout.lengths)


MIXED = [
    SamplingParams(seed=1, top_k=5, temperature=0.8, max_tokens=3, ignore_eos=True),
    SamplingParams(seed=2, top_k=8, top_p=0.9, repetition_penalty=1.5, max_tokens=None),
    SamplingParams(seed=3, top_k=4, frequency_penalty=0.5, presence_penalty=0.25, stop_token_ids=list(range(0, V, 3))),
    SamplingParams(seed=4, top_k=7, min_p=0.02, bad_words=[[1], [2, 5]], logit_bias={7: 2.0}, min_tokens=5),
]


def test_every_token_is_drawn_from_the_models_distribution():
    """Penalties see the token of step t at t + 1 (P18); prompt padding counts for nothing (P15); stop rows (P39)."""
    model, eos = random_model(), (0, 11)
    rollout = run(model, MIXED, eos=eos)
    assert_consistent(rollout, model, MIXED, eos)
    assert int(rollout.lengths[0]) == 3
    # Junk in the padding of the prompts changes nothing.
    junk = run(model, MIXED, eos=eos, pad_prompt=7)
    np.testing.assert_array_equal(junk.token_ids, rollout.token_ids)
    np.testing.assert_array_equal(junk.logprobs, rollout.logprobs)


def test_log_probs_are_those_of_the_learner():
    """First-step identity: scoring the model's logits on the recorded supports gives what was recorded."""
    model = random_model()
    params = [SamplingParams(seed=i, top_k=6, temperature=t) for i, t in enumerate((0.5, 0.8, 1.0, 1.7))]
    rollout = run(model, params)
    logits = np.stack(
        [
            np.stack([model.logits(prompt + ids[:step]) for step in range(8)])
            for prompt, ids in zip(PROMPTS, completions(rollout), strict=True)
        ]
    )
    temperature = jnp.broadcast_to(rollout.sampling.temperature[:, None], (4, 8))
    scored = masked_log_probs(jnp.asarray(logits), rollout.support, rollout.token_ids, temperature=temperature)
    np.testing.assert_allclose(scored, rollout.logprobs, atol=tolerances.LOGPROB)


@pytest.mark.slow
def test_rows_alone_are_rows_together():
    """P22, P81: finished rows stay frozen and each row is what a batch of one gives."""
    model = random_model()
    together = run(model, MIXED, eos=(0, 11))
    # Rows cut out of the batch share a program; the first one comes as a batch of its own, without anyone's edits.
    batch = SamplingBatch.from_params(MIXED, vocab_size=V, eos_token_ids=(0, 11), support_bound=8)
    prompt_ids, lengths = together.prompt_ids, together.prompt_lengths
    for row in range(4):
        if row == 0:
            alone = run(model, MIXED[:1], PROMPTS[:1], eos=(0, 11))
        else:
            this = slice(row, row + 1)
            settings = jax.tree.map(lambda leaf, this=this: leaf[this], batch)
            alone = generate(model, settings, prompt_ids[this], lengths[this], max_new_tokens=8, width=8)
        assert completions(alone)[0] == completions(together)[row]
        assert int(alone.finish[0]) == int(together.finish[row])
        assert alone.support.to_lists()[0] == together.support.to_lists()[row]
        np.testing.assert_allclose(alone.logprobs[0], together.logprobs[row], atol=tolerances.LOGPROB)


def test_an_unseeded_neighbour_changes_nothing():
    """P22."""
    model, seeded = random_model(), SamplingParams(seed=42, temperature=0.8, top_k=5)
    first, second = (run(model, [seeded, *[SamplingParams(top_k=5)] * 3]) for _ in range(2))
    np.testing.assert_array_equal(first.token_ids[0], second.token_ids[0])
    np.testing.assert_array_equal(first.logprobs[0], second.logprobs[0])
    assert first.token_ids[1:].tolist() != second.token_ids[1:].tolist()


def test_stop_ids_end_a_row_and_are_its_last_token():
    """P39: the stop token has a support of its own; what follows is padding, whatever the pad id."""
    logits = np.full(V, -9.0)
    logits[[5, 6, 7]] = [2, 2, 2]
    model = fixed_model(logits)
    # The second id never comes: with two, the program is also that of the test below.
    params = [SamplingParams(seed=i, top_p=0.9, stop_token_ids=[6, 39]) for i in range(4)]
    rollout = run(model, params, pad_token_id=6)
    for ids, finish in zip(completions(rollout), rollout.finish.tolist(), strict=True):
        assert 6 not in ids[:-1]
        assert finish == (Finish.STOP if ids[-1] == 6 else Finish.LENGTH)
    assert Finish.STOP in rollout.finish.tolist()
    assert_consistent(rollout, model, params)
    past = np.arange(8)[None, :] >= np.asarray(rollout.lengths)[:, None]
    assert (np.asarray(rollout.token_ids)[past] == 6).all()
    assert not np.asarray(rollout.loss_mask)[past].any()


def test_eos_ids_stop_unless_ignored():
    """P21: ignoring EOS leaves the user's own stop ids in force."""
    logits = np.zeros(V)
    logits[2] = 50
    greedy = functools.partial(SamplingParams, temperature=0.0)
    params = [greedy(), greedy(ignore_eos=True), greedy(ignore_eos=True, stop_token_ids=[2]), greedy(max_tokens=1)]
    rollout = run(fixed_model(logits), params, eos=(2, 3), pad_token_id=6)
    assert completions(rollout) == [[2], [2] * 8, [2], [2]]
    assert rollout.finish.tolist() == [Finish.STOP, Finish.LENGTH, Finish.STOP, Finish.STOP]


def test_min_tokens_withholds_every_eos_and_stop_id():
    """P20: greedy on [0, 0, 9, 8, 1] takes 4 twice, then 2; the prompt does not count."""
    logits = [0, 0, 9, 8, 1]
    params = [
        SamplingParams(temperature=0.0, min_tokens=2),
        SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[4]),
        SamplingParams(temperature=0.0),
    ]
    rollout = run(fixed_model(logits), params, [[4] * 5] * 3, eos=(2, 3))
    assert completions(rollout) == [[4, 4, 2], [0, 0, 2], [2]]
    assert rollout.support.to_lists()[0][:3] == [[0, 1, 4], [0, 1, 4], [0, 1, 2, 3, 4]]


def test_each_row_has_its_own_limit():
    params = [SamplingParams(seed=0, top_k=3, max_tokens=limit) for limit in (1, 4, 12, None)]
    rollout = run(random_model(), params)
    assert rollout.lengths.tolist() == [1, 4, 8, 8]
    assert rollout.finish.tolist() == [Finish.LENGTH] * 4
    assert not np.asarray(rollout.token_ids)[0, 1:].any()


@pytest.mark.slow
def test_groups():
    """P23: the samples of a prompt lie side by side, have seeds seed + i, and differ; a second call repeats them.

    They keep the history of their prompt.
    """
    model = random_model(scale=0.1)
    penalties = {7: 3.0, 100: 1.0}
    params = [SamplingParams(seed=seed, top_k=V, repetition_penalty=penalties[seed]) for seed in penalties]
    grouped = run(model, params, PROMPTS[:2], group_size=4, width=V)
    again = run(model, params, PROMPTS[:2], group_size=4, width=V)
    np.testing.assert_array_equal(grouped.token_ids, again.token_ids)
    assert grouped.group_size == 4
    # The same rows asked for one by one.
    rows = [dataclasses.replace(one, seed=one.seed + i) for one in params for i in range(4)]
    apart = run(model, rows, [prompt for prompt in PROMPTS[:2] for _ in range(4)], width=V)
    np.testing.assert_array_equal(grouped.token_ids, apart.token_ids)
    assert grouped.support.to_lists() == apart.support.to_lists()
    assert len(set(map(tuple, grouped.token_ids.tolist()))) == 8
    # One row per completion, already expanded by n.
    many = [dataclasses.replace(one, n=4) for one in params]
    batch = SamplingBatch.from_params(many, vocab_size=V)
    prompts = jnp.array([[3, 1, 4], [1, 5, 0]], jnp.int32)
    expanded = generate(model, batch, prompts, jnp.array([3, 2], jnp.int32), max_new_tokens=8, width=V, group_size=4)
    np.testing.assert_array_equal(expanded.token_ids, grouped.token_ids)
    assert_consistent(expanded, model, [r for r in many for _ in range(4)])


def test_a_row_without_a_finite_logit_ends_with_an_error():
    """P24: its earlier tokens stand, its neighbours go on as if it were not there."""
    model = random_model(3)
    clean = run(model, SamplingParams(seed=1, top_k=5))
    # Break the distribution row 2 meets at its fourth token.
    state = model.state_after([*PROMPTS[2], *completions(clean)[2][:3]])
    rollout = run(Mock(model.table.at[state].set(jnp.nan)), SamplingParams(seed=1, top_k=5))
    assert rollout.finish[2] == Finish.ERROR
    assert completions(rollout)[2] == completions(clean)[2][:3]
    assert not np.asarray(rollout.token_ids)[2, 3:].any()
    others = [0, 1, 3]
    assert [completions(rollout)[row] for row in others] == [completions(clean)[row] for row in others]
    np.testing.assert_array_equal(np.asarray(rollout.logprobs)[others], np.asarray(clean.logprobs)[others])
    assert rollout.support.to_lists()[2][3:] == [[]] * 5


def test_a_first_row_with_nothing_to_draw_has_no_tokens():
    rollout = run(fixed_model(np.full(V, np.nan)), SamplingParams(seed=1, top_k=5))
    assert rollout.lengths.tolist() == [0] * 4
    assert rollout.finish.tolist() == [Finish.ERROR] * 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counting(Mock):
    """A mock that counts its decode calls where the test can see them."""

    def decode(self, token_ids, cache):
        jax.debug.callback(lambda: CALLS.append(1))
        return super().decode(token_ids, cache)


CALLS: list[int] = []


def test_the_loop_ends_when_every_row_has():
    logits = np.zeros(V)
    logits[2] = 50
    model = Counting(fixed_model(logits).table)
    greedy = functools.partial(SamplingParams, temperature=0.0)
    for limits, expected in (((1, 1, 1, 1), 1), ((1, 5, 2, 1), 5), ((99, 8, 8, 8), 8)):
        CALLS.clear()
        jax.block_until_ready(run(model, [greedy(max_tokens=n) for n in limits]).token_ids)
        jax.effects_barrier()
        assert len(CALLS) == expected
    CALLS.clear()
    jax.block_until_ready(run(model, greedy(), eos=[2]).token_ids)
    jax.effects_barrier()
    assert len(CALLS) == 1


def test_inside_an_outer_jit():
    model = random_model()
    batch = SamplingBatch.from_params(MIXED, vocab_size=V, eos_token_ids=(0, 11), support_bound=None)
    prompts = np.zeros((4, 4), np.int32)
    for row, prompt in zip(prompts, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    lengths = jnp.asarray(np.array([len(prompt) for prompt in PROMPTS], np.int32))

    @jax.jit
    def outer(model, batch, prompts, lengths):
        rollout = generate(model, batch, prompts, lengths, max_new_tokens=8, width=8)
        return rollout, rollout.loss_mask.sum()

    rollout, num_tokens = outer(model, batch, jnp.asarray(prompts), lengths)
    eager = run(model, MIXED, eos=(0, 11))
    np.testing.assert_array_equal(rollout.token_ids, eager.token_ids)
    np.testing.assert_allclose(rollout.logprobs, eager.logprobs, atol=tolerances.LOGPROB)
    assert rollout.support.to_lists() == eager.support.to_lists()
    assert int(num_tokens) == int(eager.lengths.sum())
    # top_k is unknown inside jit, so bits are kept; outside its values show that 8 cells are enough.
    assert rollout.support.packed is not None
    assert eager.support.packed is None


WIDE = [
    SamplingParams(temperature=0.9, top_k=5, seed=1, repetition_penalty=1.2),
    SamplingParams(top_p=0.9, seed=2, max_tokens=3, presence_penalty=0.5),
    SamplingParams(temperature=0.0, seed=3, logit_bias={3: 1.0}),
    SamplingParams(min_p=0.1, seed=4, bad_words=[[1, 2], [3]]),
]


@functools.cache
def wide_rollout() -> Rollout:
    return run(random_model(), WIDE, width=4)


def test_no_step_calls_the_host():
    """P80: penalties, bad words and stop ids are looked at on the device."""
    batch = SamplingBatch.from_params(MIXED, vocab_size=V, eos_token_ids=(0, 11))
    shapes = functools.partial(generate, max_new_tokens=8, width=8)
    program = jax.make_jaxpr(shapes)(random_model(), batch, jnp.ones((4, 4), jnp.int32), jnp.full(4, 4, jnp.int32))
    assert "while" in str(program)
    assert not re.search(r"callback|infeed|outfeed|host", str(program))


def test_wide_supports_are_whole_in_the_bits():
    assert int(wide_rollout().support.counts.max()) > 4
    assert_consistent(wide_rollout(), random_model(), WIDE)


def test_the_mode_reaches_the_record():
    model = random_model()
    params = SamplingParams(seed=1, top_k=3, temperature=0.5)
    raw = run(model, params, logprobs_mode="raw_logits")
    processed = run(model, params)
    np.testing.assert_array_equal(raw.token_ids, processed.token_ids)
    ids = completions(raw)[0]
    expected = [model.logits(PROMPTS[0] + ids[:step])[token] for step, token in enumerate(ids)]
    np.testing.assert_allclose(raw.logprobs[0], expected, rtol=tolerances.LOGPROB)


def test_the_mock_keeps_the_protocol():
    assert isinstance(random_model(), Model)
    assert not isinstance(object(), Model)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[3], []], {}, r"prompt_lengths must be in \[1, 1\], got 0 in row 1"),
        ([[3, V]], {}, rf"prompt_ids must be in \[0, {V}\), got \[{V}\] in row 0"),
        ([[3], [-1]], {}, rf"prompt_ids must be in \[0, {V}\), got \[-1\] in row 1"),
        ([[3] * 60], {}, r"prompt width 60 \+ max_new_tokens 8 = 68 exceeds the model's max_length 64"),
        ([[3]], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ([[3]], {"width": 0}, "width must be at least 1, got 0"),
        ([[3]], {"group_size": 0}, "group_size must be at least 1, got 0"),
        ([[3]], {"logprobs_mode": "raw"}, "logprobs_mode must be one of"),
    ],
)
def test_errors_name_what_was_wrong(prompts, options, message):
    with pytest.raises(ValueError, match=message):
        run(random_model(), SamplingParams(top_k=3), prompts, **options)


def test_the_batch_must_fit_the_prompts():
    batch = SamplingBatch.from_params([SamplingParams()] * 3, vocab_size=V)
    with pytest.raises(
        ValueError, match=r"batch must have 2 rows \(one per prompt\) or 4 \(one per completion\), got 3"
    ):
        generate(
            random_model(),
            batch,
            jnp.zeros((2, 3), jnp.int32),
            jnp.array([1, 2], jnp.int32),
            max_new_tokens=2,
            width=4,
            group_size=2,
        )


@pytest.mark.slow
def test_logits_cut_over_a_mesh_give_the_same_rollout():
    """P28, P75, P81: rows and vocabulary over eight devices, with edits, and rows that end early."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"))
    spec = jax.sharding.PartitionSpec("data", "tensor")
    over_devices = run(random_model(), WIDE, width=4, sharding=jax.sharding.NamedSharding(mesh, spec))
    for path, leaf in jax.tree_util.tree_leaves_with_path(wide_rollout()):
        np.testing.assert_array_equal(
            leaf, functools.reduce(lambda node, key: getattr(node, key.name), path, over_devices), str(path)
        )
