import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.backends import byte_level_bpe, sentencepiece_bpe
from models.text_stream import CONTEXT, MAX_WINDOW
from models.tokenizer import Tokenizer

NAMES = ("byte_level", "byte_fallback", "with_prefix")
MANY = 6 * MAX_WINDOW


@pytest.fixture(scope="session")
def by_name(bpe_parts, spm_parts):
    return {
        "byte_level": Tokenizer(byte_level_bpe(*bpe_parts)),
        "byte_fallback": Tokenizer(sentencepiece_bpe(*spm_parts)),
        "with_prefix": Tokenizer(sentencepiece_bpe(*spm_parts, add_space_prefix=True)),
    }


@pytest.fixture(params=NAMES)
def tokenizer(request, by_name):
    return by_name[request.param]


def deltas(tokenizer, pushes, skip_special_tokens=True):
    stream = tokenizer.stream(skip_special_tokens)
    return [*(stream.push(token_ids) for token_ids in pushes), stream.finish()]


def split(token_ids, sizes):
    """The ids in pushes of these sizes, over and over."""
    pushes, start, index = [], 0, 0
    while start < len(token_ids):
        size = sizes[index % len(sizes)]
        pushes.append(token_ids[start : start + size])
        start, index = start + size, index + 1
    return pushes


@st.composite
def token_ids(draw):
    """Ids of every kind, in runs, so that runs of bytes, of special tokens and of words all grow long."""
    ranges = [(0, 8), (7, 262), (3, 258), (190, 262), (259, 273), (0, 280)]
    runs = st.sampled_from(ranges).flatmap(lambda ends: st.lists(st.integers(*ends), max_size=40))
    return [token_id for run in draw(st.lists(runs, max_size=6)) for token_id in run]


@settings(max_examples=150, deadline=None)
@given(token_ids=token_ids(), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), skip=st.booleans())
@pytest.mark.parametrize("name", NAMES)
def test_the_pieces_are_the_whole(by_name, name, token_ids, sizes, skip):
    tokenizer = by_name[name]
    pieces = deltas(tokenizer, split(token_ids, sizes), skip)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip)


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from("he lo\né日🎉𒀀\ufffd"), max_size=80))
@pytest.mark.parametrize("name", NAMES)
def test_no_piece_of_a_text_ends_inside_of_a_character(by_name, name, text):
    """Each piece continues the text itself, so it holds no U+FFFD that is not there."""
    tokenizer, done = by_name[name], ""
    for piece in deltas(tokenizer, [[token_id] for token_id in tokenizer.encode(text)]):
        done += piece
        assert text.startswith(done)
    assert done == text


def test_a_character_comes_when_its_last_byte_does(by_name):
    tokenizer = by_name["byte_level"]
    token_ids = tokenizer.encode("h🎉e")
    assert len(token_ids) == 6
    assert deltas(tokenizer, [[token_id] for token_id in token_ids]) == ["h", "", "", "", "🎉", "e", ""]


def test_byte_fallback_waits_for_the_end_of_the_run(by_name):
    tokenizer = by_name["byte_fallback"]
    token_ids = tokenizer.encode("h🎉e")
    assert deltas(tokenizer, [[token_id] for token_id in token_ids]) == ["h", "", "", "", "", "🎉e", ""]
    assert deltas(tokenizer, [token_ids[:-1]]) == ["h", "🎉"]


def test_a_broken_run_is_given_out_byte_by_byte(by_name):
    tokenizer = by_name["byte_fallback"]
    ids = {byte: token_id for token_id, byte in tokenizer.byte_tokens.items()}
    run = [ids[byte] for byte in b"\xc3\xa9\xff\xc3\xa9"]
    # The wrong third byte spoils those before and after it: the decoder takes a run whole or not at all.
    assert deltas(tokenizer, [[token_id] for token_id in run]) == ["", "", "\ufffd\ufffd\ufffd", "\ufffd", "\ufffd", ""]
    assert deltas(tokenizer, [[*run, *tokenizer.encode("he")]]) == ["\ufffd" * 5 + "he", ""]


def test_what_is_incomplete_at_the_end_is_one_replacement(by_name):
    tokenizer = by_name["byte_level"]
    begin = tokenizer.encode("🎉")[:3]
    assert deltas(tokenizer, [begin]) == ["", "\ufffd"]
    assert deltas(tokenizer, [[*begin, *tokenizer.encode("he")]]) == ["\ufffdhe", ""]


def test_wrong_bytes_are_not_held_back(by_name):
    """Of a long run of wrong bytes only the last can still wait."""
    for name, held in (("byte_level", 1), ("byte_fallback", 0)):
        tokenizer = by_name[name]
        wrong = tokenizer.encode("é")[-1]  # a byte that begins nothing
        pieces = deltas(tokenizer, [[wrong]] * MANY)
        assert len("".join(pieces[:-1])) == MANY - held, name
        assert all(len(piece) <= 1 for piece in pieces)


def test_a_character_split_by_a_special_token_is_joined_where_that_is_left_out(by_name):
    tokenizer = by_name["byte_level"]
    first, second = tokenizer.encode("é")
    assert deltas(tokenizer, [[first, 1], [second]]) == ["", "é", ""]
    assert deltas(tokenizer, [[first, 1], [second]], skip_special_tokens=False) == ["\ufffd<|im_start|>", "", "\ufffd"]


def test_only_the_first_token_of_all_loses_its_space(by_name):
    tokenizer = by_name["with_prefix"]
    token_ids = tokenizer.encode("he" + " he" * MANY)
    assert "".join(deltas(tokenizer, split(token_ids, [1]))) == "he" + " he" * MANY


def test_a_stream_can_be_used_again(tokenizer):
    stream = tokenizer.stream()
    for _ in range(2):
        assert stream.push(tokenizer.encode("é")) + stream.push([]) + stream.finish() == "é"
    assert stream.finish() == ""


@pytest.mark.parametrize("text", ["he lo" * MANY, "日" * MANY, "𒀀h" * MANY])
def test_few_ids_are_decoded_for_each_token(tokenizer, monkeypatch, text):
    num_decoded, decode = [], tokenizer.decode

    def counting(token_ids, skip_special_tokens=True):
        num_decoded.append(len(token_ids))
        return decode(token_ids, skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", counting)
    deltas(tokenizer, split(tokenizer.encode(text), [1]))
    if text.startswith("日") and tokenizer.byte_tokens:
        assert len(num_decoded) <= 2  # one run of bytes, decoded once, and the space before it
    else:
        assert max(num_decoded) <= MAX_WINDOW + CONTEXT
