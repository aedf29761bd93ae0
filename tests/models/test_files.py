import pytest

from models.files import read_json, read_json_if_present


def test_an_object_is_read_and_an_absent_file_may_stand_for_an_empty_one(tmp_path):
    path = tmp_path / "settings.json"
    assert read_json_if_present(path) == {}
    path.write_text('{"name": "ünï"}', encoding="utf-8")
    assert read_json(path) == read_json_if_present(path) == {"name": "ünï"}


def test_an_absent_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no settings\.json"):
        read_json(tmp_path / "settings.json")


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe{}", b"3", b"null", b"[" * 200_000])
def test_damaged_files_are_refused_even_where_absent_ones_are_not(tmp_path, content):
    path = tmp_path / "settings.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"settings\.json (is not valid JSON|must hold a JSON object)"):
        read_json_if_present(path)
