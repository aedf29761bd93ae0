import pytest

from jaxmask import SamplingParams, check_engine, check_sampling_mask
from jaxmask.params import LOGPROBS_MODES

TEXTS = {
    "diffusion": "sampling distribution replay does not support diffusion models",
    "processors": "sampling distribution replay does not support custom logits processors",
    "mode": "sampling distribution replay requires logprobs_mode='processed_logprobs' so that returned logprobs are "
    "normalized over the same nucleus as the sampling mask",
    "temperature": "sampling distribution replay requires temperature > 0",
    "top_k": "sampling distribution replay requires top_k > 0 to bound sampling mask size, reduce transfer overhead, "
    "and avoid potential OOMs",
}


@pytest.mark.parametrize(
    ("params", "mode", "text"),
    [
        ({"top_k": 5}, "raw_logprobs", "mode"),
        ({"top_k": 5}, "processed_logits", "mode"),
        ({"return_sampling_mask": False}, "raw_logits", "mode"),
        ({"temperature": 0.0, "top_k": 5}, "processed_logprobs", "temperature"),
        ({"temperature": 0.0}, "processed_logprobs", "temperature"),
        ({"top_k": 0}, "processed_logprobs", "top_k"),
        ({"top_k": -1}, "processed_logprobs", "top_k"),
        ({"top_p": 0.9, "return_sampling_mask": True}, "processed_logprobs", "top_k"),
    ],
)
def test_requests_that_cannot_be_replayed(params, mode, text):
    with pytest.raises(ValueError) as error:
        check_sampling_mask(SamplingParams(**params), logprobs_mode=mode)
    assert str(error.value) == TEXTS[text]


def test_requests_that_can_be_replayed():
    mode = "processed_logprobs"
    check_sampling_mask(SamplingParams(top_k=1), logprobs_mode=mode)
    check_sampling_mask(SamplingParams(temperature=0.0, return_sampling_mask=False), logprobs_mode=mode)
    check_sampling_mask(SamplingParams(top_p=0.9), logprobs_mode=mode, unbounded_support=True)
    with pytest.raises(ValueError) as error:
        check_sampling_mask(SamplingParams(temperature=0.0), logprobs_mode=mode, unbounded_support=True)
    assert str(error.value) == TEXTS["temperature"]


DIFFUSION, PROCESSORS, MODE = {"is_diffusion": True}, {"logits_processors": [print]}, {"logprobs_mode": "raw_logprobs"}
OTHER_MODES = [mode for mode in LOGPROBS_MODES if mode != "processed_logprobs"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (DIFFUSION, "diffusion"),
        (PROCESSORS, "processors"),
        *(({"logprobs_mode": mode}, "mode") for mode in OTHER_MODES),
        # Several reasons at once: the first in vLLM's order is named.
        (DIFFUSION | PROCESSORS | MODE, "diffusion"),
        (DIFFUSION | MODE, "diffusion"),
        (PROCESSORS | MODE, "processors"),
    ],
)
def test_engines_that_cannot_keep_supports(settings, text):
    settings = {"logprobs_mode": "processed_logprobs"} | settings
    with pytest.raises(ValueError) as error:
        check_engine(return_sampling_mask=True, **settings)
    assert str(error.value) == TEXTS[text]
    assert check_engine(return_sampling_mask=False, **settings) is None


@pytest.mark.parametrize("processors", [(), [], None])
def test_engines_that_can_keep_supports(processors):
    check_engine(return_sampling_mask=True, logprobs_mode="processed_logprobs", logits_processors=processors)
    check_engine(return_sampling_mask=True, logprobs_mode="processed_logprobs")


@pytest.mark.parametrize("return_sampling_mask", [False, True])
def test_an_unknown_mode_stops_every_engine(return_sampling_mask):
    """Before any other reason: a mode that does not exist is a typing error, whatever else is wrong."""
    with pytest.raises(ValueError) as error:
        check_engine(
            return_sampling_mask=return_sampling_mask,
            logprobs_mode="logprobs",
            logits_processors=[print],
            is_diffusion=True,
        )
    assert str(error.value) == f"logprobs_mode must be one of {', '.join(LOGPROBS_MODES)}, got 'logprobs'."
