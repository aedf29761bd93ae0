import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from letters import make_letters

from jaxmask import Rollout, SamplingBatch, SamplingParams, Support
from train.data_config import DataConfig
from train.tasks import Arithmetic, Countdown, Cursor, DeviceTask, HostTask, SortDigits, device_task, text_task


def rollout_of(prompts, completions, lengths, group_size):
    num_rows, width = np.shape(completions)
    return Rollout(
        prompt_ids=jnp.asarray(np.array(prompts, np.int32)),
        prompt_lengths=jnp.full(len(prompts), len(prompts[0]), jnp.int32),
        token_ids=jnp.asarray(np.array(completions, np.int32)),
        lengths=jnp.asarray(np.array(lengths, np.int32)),
        logprobs=jnp.zeros((num_rows, width)),
        support=Support.from_lists([[0]] * (num_rows * width), 11).reshape(num_rows, width),
        finish=jnp.zeros(num_rows, jnp.int32),
        sampling=SamplingBatch.from_params([SamplingParams(seed=0)] * num_rows, vocab_size=11),
        group_size=group_size,
    )


def test_sorting_is_scored_place_by_place():
    task = SortDigits(num_digits=3)
    rollout = rollout_of(
        prompts=[[3, 1, 2, 10], [9, 9, 0, 10]],
        completions=[[1, 2, 3], [1, 3, 2], [0, 9, 9], [0, 9, 9]],
        lengths=[3, 3, 3, 2],
        group_size=2,
    )
    rewards = task.score(rollout)
    np.testing.assert_allclose(rewards.values, [1, 1 / 3, 1, 2 / 3], rtol=1e-6)
    assert rewards.is_exact.tolist() == [True, False, True, False]


def test_sorting_prompts_are_digits_and_an_arrow():
    task = SortDigits(num_digits=5)
    prompts = task.prompts(jax.random.key(0), 200)
    ids = np.asarray(prompts.token_ids)
    assert (ids[:, 5] == 10).all()
    assert set(ids[:, :5].reshape(-1)) == set(range(10))
    assert (np.asarray(prompts.lengths) == 6).all()
    assert not np.array_equal(ids, task.prompts(jax.random.key(1), 200).token_ids)
    assert task.show([5, 0, 10]) == "50>"


def of_text(task, texts, width):
    """Completions as ids and lengths, from texts in a task's alphabet."""
    alphabet = {task.show([token_id]): token_id for token_id in range(task.vocab_size)}
    rows = [[alphabet[sign] for sign in text] for text in texts]
    return [row + [0] * (width - len(row)) for row in rows], [len(row) for row in rows]


@functools.cache
def prompts_of(task):
    prompts = jax.jit(task.prompts, static_argnums=1)(jax.random.key(2), 64)
    return np.asarray(prompts.token_ids), np.asarray(prompts.lengths)


def texts_of(task):
    token_ids, lengths = prompts_of(task)
    return [task.show(row[:length]) for row, length in zip(token_ids.tolist(), lengths.tolist(), strict=True)]


@functools.partial(jax.jit, static_argnums=0)
def score(task, rollout):
    return task.score(rollout)


def answers_to(task, prompt, texts, width=8):
    prompts, lengths = of_text(task, [prompt], task.prompt_width)
    completions, completion_lengths = of_text(task, texts, width)
    rollout = rollout_of(prompts, completions, completion_lengths, len(texts))
    rollout = dataclasses.replace(rollout, prompt_lengths=jnp.asarray(lengths, jnp.int32))
    return score(task, rollout)


@pytest.mark.parametrize(
    ("prompt", "text", "value"),
    [
        ("47+8=", "55.", 1),
        ("47+8=", "55", 2 / 3),
        ("47+8=", "555.", 2 / 3),
        ("47+8=", "054.", 1 / 3),
        ("47+8=", "", 0),
        ("8-47=", "-39.", 1),
        ("8-47=", "39.", 0),
        ("99+99=", "198.", 1),
        ("0-0=", "0.", 1),
        ("0-0=", "-0.", 0),
        ("7-7=", "00.", 1 / 2),
    ],
)
def test_sums_are_scored_place_by_place(prompt, text, value):
    rewards = answers_to(Arithmetic(2), prompt, [text, text])
    np.testing.assert_allclose(rewards.values, [value] * 2, rtol=1e-6)
    assert rewards.is_exact.tolist() == [value == 1] * 2


def test_sums_longer_than_the_completion_are_never_exact():
    rewards = answers_to(Arithmetic(2), "99+99=", ["198", "1"], width=3)
    np.testing.assert_allclose(rewards.values, [3 / 4, 1 / 4], rtol=1e-6)
    assert rewards.is_exact.tolist() == [False, False]


@pytest.mark.parametrize("num_digits", [1, 8])
def test_sums_are_written_as_python_writes_them(num_digits):
    task = Arithmetic(num_digits)
    texts = texts_of(task)
    answers, lengths = jax.jit(task.answers)(*map(jnp.asarray, prompts_of(task)))
    for text, answer, length in zip(texts, answers.tolist(), lengths.tolist(), strict=True):
        first, sign, second = re.fullmatch(r"(\d+)([+-])(\d+)=", text).groups()
        assert [first, second] == [str(int(first)), str(int(second))]
        assert task.show(answer[:length]) == f"{int(first) + int(sign + second)}."
    assert {len(number) for text in texts for number in re.findall(r"\d+", text)} == set(range(1, num_digits + 1))
    assert {text[-1] for text in texts} == {"="}
    assert any("+" in text for text in texts)


@pytest.mark.parametrize("task", [SortDigits(4), Arithmetic(8), Countdown()])
def test_tasks_on_the_device_keep_the_protocol(task):
    assert isinstance(task, DeviceTask)
    assert not isinstance(task, HostTask)
    assert hash(task) == hash(dataclasses.replace(task))
    token_ids, lengths = prompts_of(task)
    assert token_ids.shape == (64, task.prompt_width)
    assert ((lengths >= 1) & (lengths <= task.prompt_width)).all()
    assert ((token_ids >= 0) & (token_ids < task.vocab_size)).all()


def test_a_configuration_names_the_task():
    assert device_task(DataConfig()) == SortDigits()
    assert device_task(DataConfig(task="arithmetic", task_options=("num_digits=3",))) == Arithmetic(3)
    assert device_task(DataConfig(task="countdown", task_options=("max_number=12",))) == Countdown(max_number=12)
    assert device_task(DataConfig(task="chain-sum")) is None


@pytest.fixture(scope="module")
def chain_sum():
    task = text_task(DataConfig(task="chain-sum"), make_letters(), seed=4)
    yield task
    task.close()


def test_sums_are_asked_through_the_template_and_scored(chain_sum):
    assert isinstance(chain_sum, HostTask)
    prompts, entries, _ = chain_sum.draw(Cursor(0, 2), 3)
    first = prompts.token_ids[0, : prompts.lengths[0]].tolist()
    text = chain_sum.show(first)
    assert text == f"<{entries[0].prompt}>"
    assert text.endswith("= Answer with the number only.>")
    assert entries[0].columns["metadata"]["expression"] in text
    answers = [entry.columns["answer"] for entry in entries]
    letters = make_letters()
    completions = [letters.encode(f"it is {answer}") for answer in answers] + [letters.encode("it is 99")] * 3
    scored = chain_sum.score(entries, [completions[i] for i in (0, 3, 1, 4, 2, 5)], 2)
    assert scored.rewards.values.tolist() == [1, 0, 1, 0, 1, 0]
    assert scored.rewards.is_exact.tolist() == [True, False] * 3
    assert scored.details == {"rewards/answer": 0.5, "rewards/num_failed": 0, "rewards/num_timeouts": 0}


def test_a_number_of_a_million_digits_is_wrong_and_no_error(chain_sum):
    _, entries, _ = chain_sum.draw(Cursor(), 1)
    scored = chain_sum.score(entries, [make_letters().encode("9" * 10_000), []], 2)
    assert scored.rewards.values.tolist() == [0, 0]


def test_sums_come_in_the_order_of_their_stream_and_held_out_ones_never(chain_sum):
    again = text_task(DataConfig(task="chain-sum"), make_letters(), seed=4)
    np.testing.assert_array_equal(
        chain_sum.draw(Cursor(0, 28), 4)[0].token_ids, again.draw(Cursor(0, 28), 4)[0].token_ids
    )
    _, entries, cursor = chain_sum.draw(Cursor(), 200)
    indices = [entry.columns["metadata"]["source_index"] for entry in entries]
    assert indices == sorted(set(indices))
    assert cursor == Cursor(0, indices[-1] + 1)
    _, held_out = chain_sum.held_out(16)
    questions = {entry.columns["question"] for entry in held_out}
    assert len(questions) == len(held_out) == 16
    assert not questions & {entry.columns["question"] for entry in entries}
    assert [entry.prompt for entry in chain_sum.held_out(4)[1]] == [entry.prompt for entry in held_out[:4]]


def test_another_seed_asks_other_sums(chain_sum):
    other = text_task(DataConfig(task="chain-sum"), make_letters(), seed=400)
    drawn = [[entry.prompt for entry in task.draw(Cursor(), 20)[1]] for task in (chain_sum, other)]
    assert drawn[0] != drawn[1]
