import pytest
from stub_text import Pieces
from wordy import TOKENIZER, ids_of

from jaxmask.wire import Logprob
from serve.api.logprobs import Offsets, TokenTexts, chat_logprobs, completion_logprobs, prompt_logprobs

TEXTS = TokenTexts(TOKENIZER, as_ids=False)
A, B, C = ids_of("a", "b", "c")


def test_offsets_of_characters_in_parts():
    tokenizer = Pieces("ab", b"\xc4", b"\x8f", "<|end|>", "c")
    assert Offsets(tokenizer, skip_special_tokens=True).of([0, 1, 2, 4, 3]) == [0, 2, 2, 3, 4]
    assert Offsets(tokenizer, skip_special_tokens=False).of([0, 1, 2, 3, 4]) == [0, 2, 2, 3, 10]
    # Half a character that stays half.
    assert Offsets(tokenizer, skip_special_tokens=True).of([1, 4, 0]) == [0, 1, 2]
    offsets = Offsets(tokenizer, skip_special_tokens=True, begin=5)
    assert [*offsets.of([0]), *offsets.of([1, 2]), *offsets.of([4])] == [5, 7, 7, 8]
    assert Offsets(None, skip_special_tokens=True, begin=5).of([3, 4]) == [5, 5]


def test_the_shape_of_completions():
    entries = [None, {A: Logprob(-2.0, 3), B: Logprob(-0.5, 1)}, {}]
    assert completion_logprobs(TEXTS, [C, A, B], entries, [0, 1, 2]) == {
        "tokens": ["c", "a", "b"],
        "token_logprobs": [None, -2.0, None],
        "top_logprobs": [None, {"a": -2.0, "b": -0.5}, {}],
        "text_offset": [0, 1, 2],
    }


def test_tokens_of_one_text():
    """The drawn one's value stays, and of the others the greatest."""
    halves = Pieces(b"\xc4", b"\x8f", b"\xc5", "a")
    entries = {1: Logprob(-3.0, 3), 0: Logprob(-0.5, 1), 3: Logprob(-1.0, 2)}
    assert TokenTexts(halves, as_ids=False).likeliest(entries) == {"\ufffd": -3.0, "a": -1.0}
    names = {"token_id:1": -3.0, "token_id:0": -0.5, "token_id:3": -1.0}
    assert TokenTexts(halves, as_ids=True).likeliest(entries) == TokenTexts(None, as_ids=False).likeliest(entries)
    assert TokenTexts(halves, as_ids=True).likeliest(entries) == names


@pytest.mark.parametrize(("num", "tops"), [(0, []), (1, [B]), (2, [B, A]), (-1, [B, A, C])])
def test_the_shape_of_chat(num, tops):
    """Drawn: the third; the likeliest are those that were asked for, and no more."""
    drawn_first = {C: Logprob(-3.0, 3), B: Logprob(-0.5, 1), A: Logprob(-1.0, 2)}
    (entry,) = chat_logprobs(TEXTS, [C], [drawn_first], num)["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("c", -3.0, [99])
    assert [top["token"] for top in entry["top_logprobs"]] == [TOKENIZER.decode([token_id]) for token_id in tops]


def test_bytes_of_halves_of_characters():
    class Spelling(Pieces):
        def token_bytes(self, token_id):
            return self._pieces[token_id]

    spelling = TokenTexts(Spelling(b"\xc4", b"\x8f"), as_ids=False)
    assert spelling.spoken(0, -1.0) == {"token": "\ufffd", "logprob": -1.0, "bytes": [0xC4]}
    assert TokenTexts(spelling.tokenizer, as_ids=True).spoken(0, None)["bytes"] == list(b"token_id:0")


def test_prompts():
    assert prompt_logprobs(None) is None
    entries = [None, {A: Logprob(-1.0, 2, "a")}]
    assert prompt_logprobs(entries) == [None, {str(A): {"logprob": -1.0, "rank": 2, "decoded_token": "a"}}]
