import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_text import Pieces

from jaxmask import SamplingParams
from models.text_stream import MAX_WINDOW
from serve.detokenizer import Detokenizer

SPLIT_CHARACTER = [b"\xc4", b"\x8f"]


def pieces_and_ids(*pieces):
    return Pieces(*pieces), list(range(len(pieces)))


def stream(tokenizer, token_ids, **chosen):
    """Deltas as a server sends them, one token at a time, and the detokenizer after them."""
    text = Detokenizer(tokenizer, SamplingParams(**chosen))
    deltas = []
    for token_id in token_ids:
        text.push([token_id])
        deltas.append(text.delta())
    text.finish()
    return [*deltas, text.delta()], text


@pytest.mark.parametrize(
    ("pieces", "stop", "deltas"),
    [
        (["DEF", "G", "HI", "J"], "DEFGHIJ", ["", "", "", "", ""]),
        (["DEF", "G", "X"], "DEFGHIJ", ["", "", "DEFGX", ""]),
        (["The quick br", "own fox"], "own fox", ["The quick br", "", ""]),
        (["The quick br", "own dog"], "own fox", ["The quick br", "own dog", ""]),
        (["one\n", "\nUser", ":"], "\n\nUser:", ["one", "", "", ""]),
        # At the end nothing can follow any more.
        (["DEF", "G"], "DEFGHIJ", ["", "", "DEFG"]),
    ],
)
def test_text_that_may_begin_a_stop_string_waits(pieces, stop, deltas):
    """P58."""
    streamed, text = stream(*pieces_and_ids(*pieces), stop=stop)
    assert streamed == deltas
    assert text.text == "".join(deltas)


@pytest.mark.parametrize(
    ("piece", "stop", "cut", "kept"),
    [("Paris", "Pari", "", "Pari"), ("...", "..", "", ".."), ("a b c", "b", "a ", "a b")],
)
def test_a_stop_string_inside_of_a_token(piece, stop, cut, kept):
    """P59: text is cut, the token stays whole."""
    for include, expected in ((False, cut), (True, kept)):
        text = Detokenizer(Pieces(piece, "more"), SamplingParams(stop=stop, include_stop_str_in_output=include))
        assert text.push([0, 1, 1])
        assert (text.text, text.stop_reason, text.num_tokens) == (expected, stop, 1)
        assert text.push([1])
        assert text.finish()
        assert (text.text, text.delta(), text.num_tokens) == (expected, expected, 1)


def test_characters_of_several_tokens():
    """P57, for byte fallback: nothing is shown of half a character, and no delta holds U+FFFD."""
    deltas, text = stream(*pieces_and_ids(*SPLIT_CHARACTER, "x"))
    assert deltas == ["", "", "ďx", ""]
    deltas, text = stream(*pieces_and_ids(*SPLIT_CHARACTER))
    assert "".join(deltas) == text.text == "ď"
    deltas, text = stream(*pieces_and_ids("a", SPLIT_CHARACTER[0]))
    assert "".join(deltas) == text.text == "a\ufffd"


def test_a_stop_string_of_waiting_bytes_is_found_at_the_end():
    tokenizer, ids = pieces_and_ids("a", *SPLIT_CHARACTER)
    text = Detokenizer(tokenizer, SamplingParams(stop="ď"))
    assert not text.push(ids)
    assert text.finish()
    assert (text.text, text.stop_reason, text.num_tokens) == ("a", "ď", 3)


@pytest.mark.parametrize(
    ("stops", "stop_reason", "text"),
    [
        (["fox", "quick"], "quick", "The "),
        # Complete first, although it begins later.
        (["quick brown", "ick"], "ick", "The qu"),
        # Complete at the same character: the first of the list.
        (["uick", "quick"], "uick", "The q"),
        (["quick", "uick"], "quick", "The "),
        (["wolf", "cat"], None, "The quick brown fox"),
    ],
)
@pytest.mark.parametrize(
    "pieces", [["The quick brown fox"], ["The qu", "ick br", "own fox"], list("The quick brown fox")]
)
def test_of_several_stop_strings_the_one_complete_first_ends_the_text(stops, stop_reason, text, pieces):
    tokenizer, ids = pieces_and_ids(*pieces)
    found = Detokenizer(tokenizer, SamplingParams(stop=stops))
    assert found.push(ids) == (stop_reason is not None)
    assert (found.text, found.stop_reason) == (text, stop_reason)


@pytest.mark.parametrize(
    ("min_tokens", "text", "num_tokens"),
    [
        (0, "", 1),
        # Complete in token 1, so it stays; the next one is complete in token 3.
        (1, "abc", 3),
        (2, "abc", 3),
        # It begins in token 4, within the minimum, and is complete after it.
        (3, "abcab", 5),
        (4, "abcab", 5),
        (5, "abcababx", 6),
    ],
)
def test_stop_strings_wait_for_min_tokens(min_tokens, text, num_tokens):
    """Like EOS: the token that completes one is at least the one after `min_tokens`."""
    tokenizer, ids = pieces_and_ids("ab", "c", "ab", "a", "b", "x")
    for pushes in ([ids], [[token_id] for token_id in ids], [ids[:2], ids[2:]]):
        found = Detokenizer(tokenizer, SamplingParams(stop="ab", min_tokens=min_tokens))
        for push in pushes:
            found.push(push)
        found.finish()
        assert (found.text, found.num_tokens) == (text, num_tokens)


def test_a_stop_string_that_overlaps_one_within_min_tokens():
    tokenizer, ids = pieces_and_ids("aa", "a", "a")
    found = Detokenizer(tokenizer, SamplingParams(stop="aa", min_tokens=1))
    assert found.push(ids)
    assert (found.text, found.num_tokens) == ("a", 2)


def test_half_a_character_behind_a_stop_string_is_dropped():
    found = Detokenizer(Pieces(b"a end\xc4"), SamplingParams(stop="end"))
    assert found.push([0])
    assert found.finish()
    assert found.text == found.delta() == "a "


def test_the_text_of_a_stop_id():
    tokenizer = Pieces("one", "END", "<|eos|>")
    for include, text in ((False, "one"), (True, "oneEND")):
        found = Detokenizer(tokenizer, SamplingParams(stop_token_ids=[1], include_stop_str_in_output=include))
        assert not found.push([0, 1], ends_with_stop_id=True)
        assert (found.text, found.num_tokens, found.stop_reason) == (text, 2, None)
    for skip, text in ((True, "one"), (False, "one<|eos|>")):
        params = SamplingParams(skip_special_tokens=skip, include_stop_str_in_output=True)
        found = Detokenizer(tokenizer, params)
        found.push([0, 2], ends_with_stop_id=True)
        assert found.text == text


def test_without_text():
    for tokenizer, params in ((None, SamplingParams()), (Pieces("a"), SamplingParams(detokenize=False))):
        found = Detokenizer(tokenizer, params)
        assert not found.push([0, 0])
        assert not found.finish()
        assert (found.text, found.delta(), found.num_tokens) == ("", "", 2)
    with pytest.raises(ValueError) as error:
        Detokenizer(None, SamplingParams(stop="x"))
    assert str(error.value) == (
        "stop strings are only supported when detokenize is True. Set detokenize=True to use stop."
    )


def test_line_ends_stay_as_they_are():
    deltas, text = stream(*pieces_and_ids("a\r", "\nb\n", "\rc"), stop="\r\n\r\n")
    assert text.text == "".join(deltas) == "a\r\nb\n\rc"


ALPHABET = "ab\n"


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=12),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=3, unique=True),
    min_tokens=st.integers(0, 3),
    include=st.booleans(),
)
def test_against_a_search_of_the_whole_text(pieces, stops, min_tokens, include):
    whole = "".join(pieces)
    ignored = len("".join(pieces[:min_tokens]))
    ends = [end for end in range(ignored + 1, len(whole) + 1) if any(whole[:end].endswith(stop) for stop in stops)]
    expected, reason = whole, None
    if ends:
        reason = next(stop for stop in stops if whole[: ends[0]].endswith(stop))
        expected = whole[: ends[0] if include else ends[0] - len(reason)]
    chosen = {"stop": stops, "min_tokens": min_tokens, "include_stop_str_in_output": include}
    deltas, found = stream(*pieces_and_ids(*pieces), **chosen)
    assert (found.text, found.stop_reason) == (expected, reason)
    assert "".join(deltas) == expected
    # Nothing was held back but what may begin a stop string.
    given_out = ""
    for position, delta in enumerate(deltas[: found.num_tokens - (reason is not None)]):
        given_out += delta
        held = "".join(pieces[: position + 1])[len(given_out) :]
        assert not held or (not include and any(stop.startswith(held) and stop != held for stop in stops))
    tokenizer, ids = pieces_and_ids(*pieces)
    at_once = Detokenizer(tokenizer, SamplingParams(**chosen))
    at_once.push(ids)
    assert (at_once.text, at_once.num_tokens) == (found.text, found.num_tokens)


def seconds_of_a_push(text):
    def push():
        start = time.perf_counter()
        text.push([0])
        text.delta()
        return time.perf_counter() - start

    # The first ones move the stream's window past what came before them.
    return min([push() for _ in range(2 * MAX_WINDOW)][MAX_WINDOW:])


def test_a_push_does_not_touch_the_text_so_far():
    """10 million characters take milliseconds to copy, a push takes microseconds."""
    text = Detokenizer(Pieces("a", "long " * 2_000_000), SamplingParams())
    early = seconds_of_a_push(text)
    text.push([1])
    assert seconds_of_a_push(text) < 10 * early


@pytest.mark.slow
def test_faults_with_a_real_tokenizer(smollm2_tokenizer):
    """P57, P58 and P59 with the ids a model would draw."""
    ids = smollm2_tokenizer.encode("The ď and 日本 🙂 of Paris.")
    assert any("\ufffd" in smollm2_tokenizer.decode([token_id]) for token_id in ids)
    deltas, text = stream(smollm2_tokenizer, ids)
    assert "".join(deltas) == text.text == "The ď and 日本 🙂 of Paris."
    assert not any("\ufffd" in delta for delta in deltas)
    deltas, text = stream(smollm2_tokenizer, ids, stop="Pari")
    assert "".join(deltas) == text.text == "The ď and 日本 🙂 of "
    assert smollm2_tokenizer.decode(ids[: text.num_tokens]).endswith("Paris")
    assert text.num_tokens == len(ids) - 1
    deltas, text = stream(smollm2_tokenizer, ids, stop="日本 🙂 of Rome")
    assert "".join(deltas) == "The ď and 日本 🙂 of Paris."
    deltas, text = stream(smollm2_tokenizer, ids, stop="本", include_stop_str_in_output=True)
    assert "".join(deltas) == text.text == "The ď and 日本"
