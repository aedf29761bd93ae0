"""A byte-level tokenizer without merges, whose chat template puts a message in brackets."""

from tokenizers.pre_tokenizers import ByteLevel

from models import Tokenizer
from models.backends import byte_level_bpe


def make_letters() -> Tokenizer:
    backend = byte_level_bpe(["<end>", *sorted(ByteLevel.alphabet())], [], ["<end>"])
    template = "<{{ messages[0]['content'] }}>{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    return Tokenizer(backend, eos_token_ids=(0,), chat_template=template)
