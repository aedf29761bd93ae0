import pytest
from engine_models import PROMPTS
from serving import SAMPLING, running_server


@pytest.fixture(scope="module")
def running():
    with running_server() as running:
        yield running


def test_the_deltas_of_a_stream_are_the_whole_answer(running):
    (choice,) = running.generate(PROMPTS[2])["choices"]
    events = running.events("/inference/v1/generate", {"token_ids": PROMPTS[2], "sampling_params": SAMPLING})
    deltas = [delta for event in events for delta in event["choices"]]
    for field in ("token_ids", "sampling_mask"):
        assert [entry for delta in deltas for entry in delta[field]] == choice[field]
    assert len(choice["sampling_mask"]) == len(choice["token_ids"]) == SAMPLING["max_tokens"]
    assert [entry for delta in deltas for entry in delta["logprobs"]["content"]] == choice["logprobs"]["content"]
    assert [delta["finish_reason"] for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
