"""What a release is made of fits together: version, changelog, workflows. `make package` builds and tries it."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import release_notes
import yaml

import jaxmask

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_said_in_one_place():
    assert release_notes.version() == jaxmask.__version__
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "jaxmask/__init__.py"


def test_the_changelog_has_the_version():
    body = release_notes.notes(f"v{jaxmask.__version__}", CHANGELOG)
    assert "### Added" in body
    assert "[0.1.0]:" not in body
    headings = re.findall(r"^## \[(.*?)\]", CHANGELOG, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert set(headings) == set(re.findall(r"^\[(.*?)\]: http", CHANGELOG, re.MULTILINE)), "each has its link"


@pytest.mark.parametrize(
    ("tag", "changelog", "message"),
    [
        ("v9.9.9", CHANGELOG, "tag must be v.*, got v9.9.9"),
        (jaxmask.__version__, CHANGELOG, "tag must be v"),
        (f"v{jaxmask.__version__}", "## [Unreleased]\n", "one dated section .* has 0"),
        (f"v{jaxmask.__version__}", f"## [{jaxmask.__version__}] - soon\n\nAll.\n", "has 0"),
        (f"v{jaxmask.__version__}", f"## [{jaxmask.__version__}] - 2030-01-01\n\n[a]: b\n", "is empty"),
    ],
)
def test_a_release_that_does_not_fit_is_refused(tag, changelog, message):
    with pytest.raises(ValueError, match=message):
        release_notes.notes(tag, changelog)


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_whole(path):
    """It is read, asks for no more than it needs, and each command is a target, a script or a tool that is there."""
    workflow = yaml.safe_load(path.read_text())
    # YAML reads `on` as a truth value.
    assert workflow[True]
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    for name, job in jobs.items():
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file(), job["uses"]
            continue
        assert job["runs-on"].startswith("ubuntu-"), name
        assert job["timeout-minutes"] <= 60, name
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(jobs), name
    for step in steps(workflow):
        assert ("run" in step) != ("uses" in step)
        if "uses" in step:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+@(v\d+|release/v\d+)", step["uses"]), step
        else:
            check_command(step["run"])


def check_command(command):
    subprocess.run(["bash", "-n"], input=command, text=True, check=True)
    program, *rest = shlex.split(command.partition(" > ")[0])
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    if program == "make":
        assert {word for word in rest if "=" not in word} <= set(targets), command
    elif program == "python":
        assert (ROOT / rest[0]).is_file(), command
    elif program != "gh":
        assert (ROOT / program).stat().st_mode & 0o111, command


def test_every_python_of_ci_is_supported():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    versions = jobs["test"]["strategy"]["matrix"]["python"]
    classifiers = PROJECT["project"]["classifiers"]
    assert versions == ["3.11", "3.13"]
    assert all(f"Programming Language :: Python :: {version}" in classifiers for version in versions)
    assert PROJECT["project"]["requires-python"] == f">={versions[0]}"


def test_publishing_waits_for_tests_and_asks_for_no_password():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    assert jobs["publish"]["needs"] == ["test", "build"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    commands = [step["run"] for step in jobs["build"]["steps"] if "run" in step]
    assert "release_notes.py" in commands[0], "what does not agree is found before anything is built"
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()
