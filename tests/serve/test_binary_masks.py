"""The forms in which supports travel say the same, and feed the learner's `Support`."""

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from engine_models import PROMPTS, V
from serving import SAMPLING, running_server

from jaxmask import Support
from jaxmask.wire import from_csr
from serve.api.binary import NPZ, prefers_npz

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"


@pytest.fixture(scope="module")
def running():
    with running_server(is_warm=False) as running:
        yield running


def archive(running, status=200, accept=NPZ, **fields):
    body = {"token_ids": PROMPTS[2], "sampling_params": SAMPLING, **fields}
    response = running.client.post("/inference/v1/generate", json=body, headers={"Accept": accept})
    assert response.status_code == status, response.text
    if status != 200:
        return response.json()
    assert response.headers["content-type"] == NPZ
    return np.load(io.BytesIO(response.content))


@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_the_archive_is_the_json_answer(running, logprobs):
    sampling = {**SAMPLING, "logprobs": logprobs, "n": 2}
    expected = running.generate(PROMPTS[2], sampling_params=sampling)
    arrays = archive(running, sampling_params=sampling)
    rest = json.loads(arrays["response"].tobytes())
    assert set(rest) == set(expected)
    assert rest["usage"] == expected["usage"]
    for choice, other in zip(expected["choices"], rest["choices"], strict=True):
        number = choice["index"]
        assert arrays[f"token_ids_{number}"].tolist() == choice["token_ids"]
        ids, offsets = arrays[f"mask_ids_{number}"], arrays[f"mask_offsets_{number}"]
        assert {ids.dtype, offsets.dtype, arrays[f"token_ids_{number}"].dtype} == {np.dtype("<i4")}
        assert from_csr(ids, offsets, V).to_lists() == choice["sampling_mask"]
        assert other["finish_reason"] == choice["finish_reason"] == "length"
        assert "token_ids" not in other
        assert "sampling_mask" not in other
        assert other.get("logprobs") == (choice["logprobs"] if logprobs else None)
        if logprobs is None:
            assert f"logprobs_{number}" not in arrays
        else:
            drawn = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            assert arrays[f"logprobs_{number}"].dtype == np.float32
            assert arrays[f"logprobs_{number}"].tolist() == pytest.approx(drawn, abs=1e-7)


def test_an_archive_without_masks(running):
    arrays = archive(running, sampling_params={"max_tokens": 3, "temperature": 0, "return_sampling_mask": False})
    assert set(arrays) == {"response", "token_ids_0"}
    assert len(arrays["token_ids_0"]) == 3


def test_base64_says_the_same(running):
    (lists,) = running.generate(PROMPTS[2])["choices"]
    (coded,) = running.generate(PROMPTS[2], sampling_mask_format="base64")["choices"]
    mask = coded["sampling_mask"]
    ids, offsets = (np.frombuffer(base64.b64decode(mask[name]), "<i4") for name in ("token_ids", "offsets"))
    assert from_csr(ids, offsets, V).to_lists() == lists["sampling_mask"]
    assert Support.from_lists(lists["sampling_mask"], vocab_size=V).to_lists() == lists["sampling_mask"]


def test_an_archive_cannot_be_streamed_and_errors_stay_json(running):
    error = archive(running, 400, stream=True)["error"]
    assert error["message"] == "application/x-npz holds whole answers; it cannot be streamed."
    assert archive(running, 400, token_ids=[V])["error"]["type"] == "BadRequestError"


@pytest.mark.parametrize(
    ("accept", "is_npz"),
    [
        (None, False),
        ("*/*", False),
        ("application/*", False),
        ("text/html", False),
        ("application/x-npz", True),
        ("Application/X-NPZ ; q=0.4, */*;q=0.1", True),
        ("application/json;q=0.5, application/x-npz", True),
        ("application/json, application/x-npz;q=0.5", False),
        ("application/x-npz;q=0", False),
        ("application/x-npz;q=much", False),
        (",;,=", False),
    ],
)
def test_who_gets_an_archive(accept, is_npz):
    assert prefers_npz(accept) == is_npz


def test_the_documented_examples_run(running, capsys):
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    forms = [block for block in blocks if "/inference/v1" in block]
    assert len(forms) == 3
    for block in forms:
        code = block.replace("http://127.0.0.1:8000", running.url).replace("49152", str(V))
        exec(compile(code, "serving.md", "exec"), {})
        counts = re.match(r"\[([\d\s]+)\]", capsys.readouterr().out)[1].split()
        assert counts
        assert all(1 <= int(count) <= 20 for count in counts)  # top_k is 20
