"""Builds the wheel and the sdist, and tries the wheel in an environment where nothing else is.

    python tests/check_package.py --out dist

Needs `build` and `hatchling`. The wheel must hold the library alone; the sdist every file of the checkout that is in
git, and give the same wheel; the wheel's own dependencies must be enough for `installed.py`.
"""

import argparse
import email
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

import jaxmask

ROOT = Path(__file__).parents[1]
# In git, and of no use without it.
NOT_IN_SDIST = (".ci/", ".github/")
# What says what, in the wheel's METADATA.
NEEDED_FIELDS = ("Summary", "License-Expression", "Requires-Python", "Keywords", "Classifier", "Requires-Dist")
NEEDED_URLS = ("Homepage", "Documentation", "Changelog", "Issues")


def main() -> None:
    """Ends with an AssertionError that says what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where wheel and sdist are left")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(ROOT, folder / "dist", "--wheel", "--sdist")
        (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
        check_wheel(wheel)
        check_sdist(sdist, folder, wheel)
        check_installed(wheel, folder)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            for path in (wheel, sdist):
                shutil.copy(path, out)
        print(f"{wheel.name} and {sdist.name} are whole, and the wheel works alone.")


def run(*command: str | Path, **options: object) -> str:
    """What a command printed; where it fails, all of it is in the message."""
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def build(source: Path, out: Path, *kinds: str) -> None:
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, *kinds, source)


def check_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = email.message_from_bytes(archive.read(f"jaxmask-{jaxmask.__version__}.dist-info/METADATA"))
    folders = {name.split("/")[0] for name in names}
    assert folders == {"jaxmask", f"jaxmask-{jaxmask.__version__}.dist-info"}, folders
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "jaxmask").rglob("*.py")}
    missing = ({"jaxmask/py.typed"} | modules) - set(names)
    assert not missing, f"the wheel lacks {sorted(missing)}"
    absent = [field for field in NEEDED_FIELDS if not metadata.get_all(field)]
    assert not absent, f"the metadata lack {absent}"
    urls = [line.split(",")[0] for line in metadata.get_all("Project-URL", [])]
    assert set(NEEDED_URLS) <= set(urls), urls
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "Keep the sampling mask" in metadata.get_payload()


def check_sdist(sdist: Path, folder: Path, wheel: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    if (ROOT / ".git").exists():
        tracked = run("git", "-C", ROOT, "ls-files").splitlines()
        wanted = [name for name in tracked if (ROOT / name).exists() and not name.startswith(NOT_IN_SDIST)]
        missing = [name for name in wanted if not (unpacked / name).is_file()]
        assert not missing, f"the sdist lacks {missing}"
    build(unpacked, folder / "again", "--wheel")
    assert (folder / "again" / wheel.name).read_bytes() == wheel.read_bytes(), "the sdist gives another wheel"


def check_installed(wheel: Path, folder: Path) -> None:
    """In an environment of the wheel and what it asks for, outside of the checkout and without its variables."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JAX", "XLA"))}
    options = {"cwd": folder / "empty", "env": environment | {"JAX_PLATFORMS": "cpu"}}
    options["cwd"].mkdir()
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", wheel, **options)
    run(python, "-m", "pip", "check", **options)
    for script in ("installed.py", "mock_model.py"):
        shutil.copy(ROOT / "tests" / script, folder)
    print(run(python, folder / "installed.py", jaxmask.__version__, **options), end="")


if __name__ == "__main__":
    main()
