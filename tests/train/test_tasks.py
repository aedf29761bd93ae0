import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from jaxmask import Rollout, SamplingBatch, SamplingParams, Support
from models import Tokenizer
from models.backends import byte_level_bpe
from train.tasks import ChainSum, SortDigits
from train.tasks.chain_sum import last_integer


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


@pytest.mark.parametrize(
    ("text", "number"),
    [("12", 12), ("7 + 5 = 12.", 12), ("5 - 9 = -4", -4), ("no number", None), ("", None), ("12\n13 or 14", 14)],
)
def test_the_last_integer_is_the_answer(text, number):
    assert last_integer(text) == number


def letters():
    """A byte-level tokenizer without merges, whose chat template puts a message in brackets."""
    backend = byte_level_bpe(["<end>", *sorted(ByteLevel.alphabet())], [], ["<end>"])
    return Tokenizer(backend, eos_token_ids=(0,), chat_template="<{{ messages[0]['content'] }}>")


@pytest.fixture(scope="module")
def chain_sum():
    return ChainSum(letters(), seed=4)


def test_sums_are_asked_through_the_template_and_scored(chain_sum):
    prompts, entries = chain_sum.prompts(2, 3)
    first = prompts.token_ids[0, : prompts.lengths[0]].tolist()
    text = chain_sum.show(first)
    assert text.startswith("<")
    assert text.endswith("Answer with the number only.>")
    assert entries[0]["metadata"]["expression"] in text
    answers = [entry["answer"] for entry in entries]
    completions = [letters().encode(f"it is {answer}") for answer in answers] + [letters().encode("it is 99")] * 3
    order = [0, 3, 1, 4, 2, 5]
    rewards = chain_sum.score(entries, [completions[i] for i in order], 2)
    assert rewards.values.tolist() == [1, 0, 1, 0, 1, 0]
    assert rewards.is_exact.tolist() == [True, False] * 3


def test_prompts_depend_on_the_step_alone_and_do_not_repeat(chain_sum):
    again = ChainSum(letters(), seed=4)
    np.testing.assert_array_equal(chain_sum.prompts(7, 4)[0].token_ids, again.prompts(7, 4)[0].token_ids)
    indices = [entry["metadata"]["source_index"] for step in range(5) for entry in chain_sum.prompts(step, 4)[1]]
    assert indices == list(range(20))
