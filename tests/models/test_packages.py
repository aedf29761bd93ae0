import hashlib
import sys

import pytest

from models.load import find
from models.packages import NUM_PARTS, PACKAGES

PARTS = (b"GGUF and", b" so", b" on")


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A model in three pieces, whose packages fail where they are imported."""
    monkeypatch.setitem(PACKAGES, "cut-model", "cut_model")
    monkeypatch.setitem(NUM_PARTS, "cut_model", len(PARTS))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    names = ["cut_model", *(f"cut_model_part{number}" for number in range(1, len(PARTS) + 1))]
    for name in names:
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text("raise ImportError")
    for number, content in enumerate(PARTS):
        (tmp_path / names[number + 1] / "data" / f"m.gguf.part{number:02}").write_bytes(content)
    digest = hashlib.sha256(b"".join(PARTS)).hexdigest()
    (tmp_path / "cut_model" / "data" / "SHA256SUMS").write_text(f"{digest}  m.gguf\n")
    return tmp_path


def refusal(error):
    with pytest.raises(error) as raised:
        find("cut-model")
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_pieces_are_joined_once_into_the_cache(packages):
    path = find("Cut-Model")
    assert path.parent == packages / "cache" / "jaxmask"
    assert path.name.endswith("-m.gguf")
    assert path.read_bytes() == b"".join(PARTS)
    before = path.stat().st_mtime_ns
    assert find("cut-model") == path
    assert path.stat().st_mtime_ns == before
    assert list(path.parent.iterdir()) == [path]
    assert not any(name.startswith("cut_model") for name in sys.modules)


def test_a_file_of_another_size_is_made_again(packages):
    path = find("cut-model")
    path.write_bytes(b"half")
    assert find("cut-model").read_bytes() == b"".join(PARTS)


def test_pieces_of_another_file_are_refused_and_leave_nothing(packages):
    (packages / "cut_model_part2" / "data" / "m.gguf.part01").write_bytes(b"!!!")
    assert "the pieces of m.gguf have SHA-256" in refusal(ValueError)
    assert list((packages / "cache" / "jaxmask").iterdir()) == []


def test_what_a_package_lacks_is_named(packages):
    (packages / "cut_model_part2" / "data" / "m.gguf.part01").unlink()
    assert "must hold one piece of m.gguf, it holds 0" in refusal(FileNotFoundError)
    (packages / "cut_model" / "data" / "SHA256SUMS").write_text("junk")
    assert "SHA256SUMS must hold a SHA-256 and a file name" in refusal(ValueError)


@pytest.mark.parametrize("module", ["cut_model", "cut_model_part3"])
def test_a_package_that_is_not_installed_is_named(packages, module, monkeypatch):
    (packages / module).rename(packages / "away")
    assert f"model 'cut-model' needs the module {module!r}" in refusal(FileNotFoundError)
