"""Lines that are longer than anything should be, and the ends of files."""

import gzip

import pytest

from jaxmask.audit import lines


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_line_without_an_end_is_passed_over(tmp_path, monkeypatch, pack):
    """It is never in memory as a whole; its bytes are counted."""
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
    text = b"[1]\n" + b"[" + b"1," * 400 + b"1]\n" + b"[2]\n" + b"[" * 1000
    (tmp_path / "a.jsonl").write_bytes(pack(text))
    found = list(lines.lines(tmp_path / "a.jsonl"))
    assert [line.value for line in found] == [[1], None, [2], None]
    assert [line.num_bytes for line in found] == [4, 804, 4, 1000]
    assert [line.number for line in found] == [1, 2, 3, 4]
    assert "804 bytes are more than a line of 100" in found[1].error
    assert not found[2].error


def test_a_text_over_several_lines_is_no_longer_than_a_line(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text("[\n1,\n2\n]\n")
    (found,) = lines.lines(tmp_path / "a.json")
    assert (found.value, found.number, found.num_bytes) == ([1, 2], 1, 9)
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 8)
    assert [bool(line.error) for line in lines.lines(tmp_path / "a.json")] == [True, True, False, True]


def test_the_mark_of_utf8_and_other_ends_of_lines(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf1\r\n\r\n \t\n2")
    found = list(lines.lines(tmp_path / "a.jsonl"))
    assert [(line.value, line.is_blank, line.error) for line in found] == [
        (1, False, ""),
        (None, True, ""),
        (None, True, ""),
        (2, False, ""),
    ]
