import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from jaxmask import PromptLookup, SamplingBatch, SamplingParams, generate
from serve.llm import LLM

V, LENGTH = 100, 64
CONFIG = models.DecoderConfig(
    vocab_size=V,
    num_layers=2,
    width=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_width=24,
    rope_theta=1e4,
    rope_scaling=None,
    norm_eps=1e-6,
    tie_embeddings=False,
    attention_bias=False,
    qk_norm=False,
    max_length=LENGTH,
    sliding_window=6,
    full_layers=(1,),
)
# Two log-probabilities of one prefix, once read alone and once in a batch.
LOGPROB = 1e-4


def noisy(seed):
    """Large enough weights that a wrong position shows."""
    noise, decoder = np.random.default_rng(seed), models.Decoder(CONFIG, rngs=nnx.Rngs(seed))
    return jax.tree.map(lambda leaf: jnp.asarray(leaf + 0.5 * noise.standard_normal(leaf.shape), jnp.float32), decoder)


DECODER, DRAFT = noisy(0), noisy(1)
random = np.random.default_rng(0)
# Some of them longer than what is read at once.
PROMPTS = [random.integers(0, V, size).tolist() for size in (3, 9, 40, 16, 23, 1, 30)]
# Text that repeats itself: guesses from the text are often right.
PROMPTS[1] = [5, 6, 7] * 3
PARAMS = [
    SamplingParams(temperature=1.2, seed=0, max_tokens=9, top_k=0),
    SamplingParams(temperature=0.3, seed=1, max_tokens=20, top_p=0.9),
    SamplingParams(temperature=0.9, seed=2, max_tokens=14, top_k=5),
    SamplingParams(temperature=2.0, seed=3, max_tokens=5, top_k=90),
    SamplingParams(temperature=1.0, seed=4, max_tokens=24, min_p=0.05),
    SamplingParams(temperature=0.7, seed=5, max_tokens=1, top_k=2),
    SamplingParams(temperature=1.0, seed=6, max_tokens=17, top_p=0.5),
]
SETTINGS = {
    "return_sampling_mask": True,
    "logprobs_mode": "processed_logprobs",
    "unbounded_support": True,
    "max_num_seqs": 2,
    "min_model_len": LENGTH,
    "prefill_chunk_size": 16,
    "steps_per_chunk": 4,
}


@pytest.fixture(scope="module")
def alone():
    """What `generate` gives, in one batch."""
    ids = np.zeros((len(PROMPTS), 40), np.int32)
    for row, prompt in zip(ids, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    lengths = jnp.asarray(np.array([len(prompt) for prompt in PROMPTS], np.int32))
    batch = SamplingBatch.from_params(PARAMS, vocab_size=V)
    return generate(DECODER, batch, jnp.asarray(ids), lengths, max_new_tokens=24, width=8)


def assert_equal(outputs, rollout):
    supports = rollout.support.to_lists()
    for row, output in enumerate(outputs):
        completion, length = output.outputs[0], int(rollout.lengths[row])
        assert completion.token_ids == rollout.token_ids[row, :length].tolist()
        assert completion.sampling_mask.token_ids == supports[row][:length]
        found = [e[token].logprob for token, e in zip(completion.token_ids, completion.logprobs, strict=True)]
        np.testing.assert_allclose(found, rollout.logprobs[row, :length], rtol=0, atol=LOGPROB)


def with_logprobs(params):
    return [SamplingParams(**{**vars(one), "logprobs": 0}) for one in params]


def read_again(texts):
    """Log-probabilities over the vocabulary after each token of each text, in one batch."""
    lengths = np.array([len(text) for text in texts], np.int32)
    ids = np.zeros((len(texts), LENGTH), np.int32)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    logits = jax.jit(lambda decoder, *rows: decoder.logits(*rows))(DECODER, jnp.asarray(ids), jnp.asarray(lengths))
    return np.asarray(jax.nn.log_softmax(logits, axis=-1), np.float64)


def test_answers_are_those_of_generate(alone):
    """Supports wider than their cells, prompts read in pieces, layers with windows, seven requests on two slots."""
    llm = LLM(DECODER, **SETTINGS)
    outputs = llm.generate(PROMPTS, with_logprobs(PARAMS))
    assert max(max(output.outputs[0].sampling_mask.counts) for output in outputs) > 64
    assert_equal(outputs, alone)
    wide = [number for number, output in enumerate(outputs) if max(output.outputs[0].sampling_mask.counts) > 64]
    assert 0 in wide
    narrow = [number for number in range(len(PROMPTS)) if number not in wide]
    llm.generate([PROMPTS[number] for number in narrow], [PARAMS[number] for number in narrow])
    assert llm.last_stats.compiled.num_programs == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "speculative_config",
    [
        {"method": "ngram", "num_speculative_tokens": 3},
        {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 2},
        {"method": "draft_model", "model": DECODER, "num_speculative_tokens": 2},
    ],
    ids=["ngram", "other", "itself"],
)
def test_guesses_change_nothing_but_the_number_of_steps(alone, speculative_config):
    llm = LLM(DECODER, **SETTINGS, speculative_config=speculative_config)
    outputs = llm.generate(PROMPTS, with_logprobs(PARAMS))
    assert_equal(outputs, alone)
    if speculative_config.get("model") is DECODER:
        # All guesses are right: three tokens a step.
        assert llm.engine.counters.num_busy_slot_steps == sum(-(-one.max_tokens // 3) for one in PARAMS)


def test_settings_of_guesses():
    llm = LLM(DECODER, speculative_config={"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 2})
    assert llm.engine.config.speculation == PromptLookup(num_tokens=5, max_ngram=2, min_ngram=1)


def test_log_probabilities_of_vllms_default_mode():
    """P36, P37 and P38: of all the vocabulary, whatever is sampled; the drawn token first, each token once."""
    llm = LLM(DECODER, max_num_seqs=4, min_num_seqs=4, max_logprobs=-1)
    params = [
        SamplingParams(temperature=0.0, max_tokens=4, logprobs=2),
        SamplingParams(temperature=1.5, max_tokens=6, logprobs=3, seed=1),
        SamplingParams(temperature=0.5, top_k=4, max_tokens=6, logprobs=0, seed=2, prompt_logprobs=2),
        SamplingParams(temperature=1.0, max_tokens=3, logprobs=-1, seed=3, prompt_logprobs=2),
    ]
    outputs = llm.generate([PROMPTS[number] for number in (0, 1, 4, 6)], params)
    texts = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
    for output, one, text, values in zip(outputs, params, texts, read_again(texts), strict=True):
        completion = output.outputs[0]
        assert completion.sampling_mask is None
        order = np.argsort(-values, axis=-1, kind="stable")
        start = len(output.prompt_token_ids)
        for position in range(1, len(text)):
            is_new = position >= start
            asked = one.logprobs if is_new else one.prompt_logprobs
            if asked is None:
                continue
            entries = (completion.logprobs[position - start] if is_new else output.prompt_logprobs[position]).items()
            listed = order[position - 1][: V if asked == -1 else asked].tolist()
            assert next(iter(entries))[0] == text[position]
            assert {token for token, _ in entries} == {text[position], *listed}
            for token, entry in entries:
                assert entry.logprob == pytest.approx(values[position - 1][token], abs=LOGPROB)
                assert entry.rank == 1 + order[position - 1].tolist().index(token)
        assert (output.prompt_logprobs is None) == (one.prompt_logprobs is None)
        assert output.prompt_logprobs is None or output.prompt_logprobs[0] is None
    assert outputs[0].outputs[0].token_ids == [next(iter(entries)) for entries in outputs[0].outputs[0].logprobs]
    greedy = outputs[0].outputs[0]
    assert {entries[token].rank for token, entries in zip(greedy.token_ids, greedy.logprobs, strict=True)} == {1}
