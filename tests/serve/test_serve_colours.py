import dataclasses
import re

import pytest
from rich.console import Console
from stub_llm import MASK, PIECES, SIZES, TOKENIZER
from stub_text import Pieces

from serve.colours import BANDS, coloured, legend, style_of, summary
from serve.outputs import CompletionOutput, SamplingMask

COMPLETION = CompletionOutput(0, "", list(range(8)), sampling_mask=MASK, finish_reason="stop")
WITHOUT_MASK = dataclasses.replace(COMPLETION, sampling_mask=None)
SHOWN = ["Paris", ", of", " course", ".\u21b5\n", "\u21b5\n", "It", " is\\x1b[31m", "<|eos|>"]


def printed(text, **screen):
    console = Console(width=20, soft_wrap=True, highlight=False, **screen)
    with console.capture() as capture:
        console.print(text)
    return capture.get()


def test_each_token_has_the_colour_of_its_size():
    styles = [style_of(size) for size in SIZES]
    assert styles == ["", "", "cyan", "green", "yellow", "yellow", "bold magenta", "green"]
    assert len({style for _, _, style in BANDS}) == len(BANDS)
    text = coloured(COMPLETION, TOKENIZER)
    assert text.plain == "".join(SHOWN)
    spans = {(text.plain[span.start : span.end], str(span.style)) for span in text.spans}
    assert spans == {(piece, style) for piece, style in zip(SHOWN, styles, strict=True) if style}
    assert "\x1b[36m course\x1b[0m" in printed(text, force_terminal=True, color_system="standard")


def test_without_colours_there_is_no_escape_code():
    assert printed(coloured(COMPLETION, TOKENIZER), force_terminal=False) == "".join(SHOWN) + "\n"
    assert "\x1b" not in printed(legend(), force_terminal=False)


def test_what_a_model_writes_cannot_move_the_cursor():
    """Also on a coloured screen every escape code is ours."""
    text = "\x1b[2J\x07\x9b31m\x7f\r\tok"
    completion = CompletionOutput(0, text, [0], sampling_mask=SamplingMask.from_lists([[0]]))
    shown = coloured(completion, Pieces(text)).plain
    assert shown == r"\x1b[2J\x07\x9b31m\x7f\x0d" + "\tok"
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)


def test_sizes_in_brackets_stay_on_the_line_of_their_token():
    text = coloured(COMPLETION, TOKENIZER, sizes=True).plain
    assert text == "Paris[1], of[1] course[2].\u21b5[8]\n\u21b5[9]\nIt[32] is\\x1b[31m[33]<|eos|>[3]"
    assert coloured(WITHOUT_MASK, TOKENIZER, sizes=True).plain == "".join(SHOWN)


def test_characters_of_several_tokens_come_with_the_last():
    tokenizer = Pieces(b"\xc4", b"\x8f", "x")
    completion = CompletionOutput(0, "", [0, 1, 2], sampling_mask=SamplingMask.from_lists([[0], [1, 2], [0, 1, 2]]))
    assert coloured(completion, tokenizer).plain == "ďx"
    assert coloured(dataclasses.replace(completion, token_ids=[2, 0, 1]), tokenizer).plain == "xď"
    assert coloured(dataclasses.replace(completion, token_ids=[2, 2, 0]), tokenizer).plain == "xx\ufffd"


@pytest.mark.parametrize(
    ("completion", "line"),
    [
        # Mean (1 + 1 + 2 + 8 + 9 + 32 + 33 + 3) / 8, median between 3 and 8.
        (COMPLETION, "8 tokens (stop)   support mean 11.1, median 5.5, max 33   25% of one id"),
        (WITHOUT_MASK, "8 tokens (stop)"),
        (
            CompletionOutput(0, "", [1], sampling_mask=MASK[:1], finish_reason="stop", stop_reason="END"),
            "1 tokens (stop at 'END')   support mean 1.0, median 1, max 1   100% of one id",
        ),
        (CompletionOutput(0, "", [], sampling_mask=MASK[:0]), "0 tokens (not finished)"),
    ],
)
def test_the_line_below(completion, line):
    assert summary(completion) == line


def test_the_legend_names_every_band():
    assert legend().plain == "ids in the support:  1 id  2  3-8  9-32  33+"
    assert [str(span.style) for span in legend().spans] == [style for _, _, style in BANDS if style]
    assert len(PIECES) == len(SIZES)
