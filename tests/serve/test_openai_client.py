"""The official client, against a running server."""

import asyncio

import openai
import pytest
from serving import NAME, running_server
from wordy import MESSAGES, MODEL, PROMPT, SCRIPTS, TOKENIZER, ids_of

SETTINGS = {"model": NAME, "seed": 4, "max_tokens": 8}
EXTRA = {"top_k": 7, "return_token_ids": True}


def client_of(running):
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(wordy_server):
    with client_of(wordy_server) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


def test_completions(client):
    answer = client.completions.create(prompt=PROMPT, n=2, logprobs=2, temperature=1.1, extra_body=EXTRA, **SETTINGS)
    assert answer.usage.completion_tokens == 16
    for index, choice in enumerate(answer.choices):
        assert choice.index == index
        assert choice.text == TOKENIZER.decode(choice.token_ids)
        assert choice.finish_reason == "length"
        assert len(choice.logprobs.tokens) == len(choice.sampling_mask) == 8
        assert choice.logprobs.top_logprobs[0][choice.logprobs.tokens[0]] == choice.logprobs.token_logprobs[0]


def test_streamed_completions(client):
    options = {"include_usage": True}
    whole = client.completions.create(prompt=PROMPT, n=2, extra_body=EXTRA, **SETTINGS)
    texts, masks, usage = ["", ""], [[], []], None
    stream = client.completions.create(
        prompt=PROMPT, n=2, stream=True, stream_options=options, extra_body=EXTRA, **SETTINGS
    )
    for event in stream:
        usage = event.usage
        for choice in event.choices:
            texts[choice.index] += choice.text
            masks[choice.index] += choice.sampling_mask
    assert texts == [choice.text for choice in whole.choices]
    assert masks == [choice.sampling_mask for choice in whole.choices]
    assert usage == whole.usage


def test_stop(client):
    answer = client.completions.create(
        model=NAME, prompt=ids_of("a"), stop=["HI"], max_tokens=9, extra_body={"top_k": 2, "return_token_ids": True}
    )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("DEFG", "stop", "HI")
    assert choice.token_ids == ids_of(*SCRIPTS["a"][:3])


def test_chat(client):
    answer = client.chat.completions.create(
        messages=MESSAGES, logprobs=True, top_logprobs=2, n=2, user="me", extra_body=EXTRA, **SETTINGS
    )
    for choice in answer.choices:
        assert choice.message.role == "assistant"
        assert choice.message.content == TOKENIZER.decode(choice.token_ids)
        assert not choice.message.tool_calls
        assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * 8
        assert b"".join(bytes(entry.bytes) for entry in choice.logprobs.content).decode() == "".join(
            entry.token for entry in choice.logprobs.content
        )


def test_streamed_chat(client):
    # The client's helper takes no reply that was cut.
    settings = SETTINGS | {
        "max_tokens": 40,
        "extra_body": {**EXTRA, "stop_token_ids": list(range(60, 256)), "min_tokens": 3},
    }
    whole = client.chat.completions.create(messages=MESSAGES, **settings)
    with client.chat.completions.stream(messages=MESSAGES, **settings) as stream:
        said = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert said == final.choices[0].message.content == whole.choices[0].message.content
    assert said
    assert final.choices[0].finish_reason == "stop"


def test_many_at_once(wordy_server, client):
    async def ask_all():
        url = f"{wordy_server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=60) as many:
            return await asyncio.gather(
                *(many.completions.create(prompt=PROMPT, extra_body=EXTRA, **SETTINGS | {"seed": i}) for i in range(16))
            )

    answers = asyncio.run(ask_all())
    for seed in (0, 7, 15):
        alone = client.completions.create(prompt=PROMPT, extra_body=EXTRA, **SETTINGS | {"seed": seed})
        assert alone.choices == answers[seed].choices


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("changes", "kind", "param"),
    [
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"temperature": 0}, openai.BadRequestError, None),
        ({"logit_bias": {"900": 1}}, openai.BadRequestError, None),
        ({"model": "gpt"}, openai.NotFoundError, "model"),
        ({"extra_body": {"colour": 1}}, openai.BadRequestError, "colour"),
    ],
)
def test_errors(client, is_streamed, changes, kind, param):
    settings = {**SETTINGS, "extra_body": EXTRA, "stream": is_streamed, **changes}
    for create in (
        lambda: client.completions.create(prompt=PROMPT, **settings),
        lambda: client.chat.completions.create(messages=MESSAGES, **settings),
    ):
        with pytest.raises(kind) as caught:
            create()
        assert caught.value.body["message"]
        assert caught.value.param == param
        assert caught.value.body["code"] == caught.value.status_code


def test_a_full_queue_and_a_pause(wordy_server):
    """429 and 503, both with the time after which to try again."""
    with running_server(MODEL, TOKENIZER, is_warm=False, max_waiting=0) as running, client_of(running) as client:
        engine = running.service.engine

        def on_loop(work):
            return asyncio.run_coroutine_threadsafe(work, engine._loop).result(20)

        on_loop(engine.pause("keep"))
        waiting = client.completions.create(prompt=PROMPT, n=4, stream=True, extra_body=EXTRA, **SETTINGS)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(prompt=PROMPT, extra_body=EXTRA, **SETTINGS)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        waiting.close()
        running.wait_until_idle()
        on_loop(engine.pause("wait"))
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(messages=MESSAGES, extra_body=EXTRA, **SETTINGS)
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1
