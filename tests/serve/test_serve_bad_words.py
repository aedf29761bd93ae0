import pytest

from jaxmask import SamplingParams
from serve.bad_words import encode_bad_words, with_encoded_bad_words


class Letters:
    """One id for each letter; a space joins the letter behind it (id + 100), and is id 0 before none."""

    def encode(self, text, add_special_tokens=False):
        assert not add_special_tokens
        ids, joins = [], False
        for letter in text:
            if letter == " ":
                ids += [0] if joins else []
                joins = True
            else:
                ids.append(ord(letter) - ord("a") + 1 + 100 * joins)
                joins = False
        return ids + [0] * joins


class Spaced(Letters):
    """A space is a token of its own."""

    def encode(self, text, add_special_tokens=False):
        return [0 if letter == " " else ord(letter) - ord("a") + 1 for letter in text]


@pytest.mark.parametrize(
    ("tokenizer", "words", "ids"),
    [
        (Letters(), ["ab"], ((1, 2), (101, 2))),
        # Space at the left is not part of the word, space inside is.
        (Letters(), ["  a b"], ((1, 102), (101, 102))),
        (Letters(), ["a", [7, 8], "b"], ((1,), (101,), (7, 8), (2,), (102,))),
        # Behind a space there is one id more.
        (Spaced(), ["ab"], ((1, 2),)),
        (Letters(), [], ()),
        (None, [[7]], ((7,),)),
    ],
)
def test_both_spellings_of_a_word(tokenizer, words, ids):
    assert encode_bad_words(tokenizer, words) == ids


@pytest.mark.parametrize(
    ("tokenizer", "word", "message"),
    [
        (Letters(), "  ", "bad_words cannot contain a word of no tokens. Got '  '."),
        (None, "ab", "bad_words as text need a tokenizer, which this model does not have. Got 'ab'."),
    ],
)
def test_words_that_cannot_be_spelled(tokenizer, word, message):
    with pytest.raises(ValueError) as error:
        encode_bad_words(tokenizer, [word])
    assert str(error.value) == message


def test_settings_keep_the_rest():
    params = SamplingParams(bad_words=["ab", [7]], seed=3, top_k=5)
    encoded = with_encoded_bad_words(params, Letters())
    assert encoded == SamplingParams(bad_words=[[1, 2], [101, 2], [7]], seed=3, top_k=5)
    assert with_encoded_bad_words(encoded, None) is encoded


@pytest.mark.slow
def test_words_of_a_real_vocabulary(smollm2_tokenizer):
    """Both ids decode to the word; a word of several tokens is spelled behind a space only where that is as long."""
    words = encode_bad_words(smollm2_tokenizer, ["Paris"])
    assert [smollm2_tokenizer.decode(word) for word in words] == ["Paris", " Paris"]
    assert all(smollm2_tokenizer.decode(word).strip() == "x" for word in encode_bad_words(smollm2_tokenizer, [" x"]))
