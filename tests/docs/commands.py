"""Commands of the pages, tried as far as that is cheap: what they name exists, what they say is understood."""

import ast
import contextlib
import io
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import httpx
import yaml
from blocks import ROOT, commands
from packaging.requirements import Requirement

import serve.cli
import train.cli
from serve.generate_command import GenerateOptions
from serve.server_command import ServerOptions

HOME = "https://github.com/jaxmask/jaxmask"
ADDRESS = "http://127.0.0.1:8000"
# What a run of several processes is told besides; `--print-config` is for one.
OF_PROCESSES = re.compile(r"--(coordinator|num-processes|process-id|out)[ =]\S+|--distributed")
VARIABLE = re.compile(r"\$\{[^}]*\}|\$\w+")


class Shell:
    """Tries commands.

    Attributes:
      folder: where files that commands write are, and files that they read.
      url: of a server; a function, so that none is started where none is asked.
      file: rollouts, in place of whatever file an audit is shown with.
    """

    def __init__(self, folder: Path, url, file):
        """Nothing is tried yet."""
        self.folder, self.url, self.file = folder, url, file

    def check(self, code: str) -> None:
        """Raises where something of a block is wrong."""
        subprocess.run(["bash", "-n"], input=code, text=True, check=True, capture_output=True)
        if re.search(r"^(for|if|while) |^#!", code, re.MULTILINE):
            self.check_script(code)
        else:
            for command in commands(code):
                self.run(command)

    def run(self, command: str) -> None:
        """One command, as far as it is tried."""
        command, _, target = command.partition(" > ")
        words = shlex.split(command, comments=True)
        while words and re.match(r"\w+=", words[0]):
            words = words[1:]
        program, *rest = words
        program = "python" if re.fullmatch(r"(.*/)?python[\d.]*|PYTHON-WITH-\w+", program) else Path(program).name
        known = {
            "make": self.make,
            "pip": self.pip,
            "python": self.python,
            "curl": self.curl,
            "git": self.git,
            "cd": lambda rest: None,
            "source": lambda rest: None,
            "ruff": lambda rest: None,
            "mypy": lambda rest: None,
            "jaxmask": self.jaxmask,
            "vllm": self.vllm,
        }
        assert program in known, f"nothing here knows how to try {program!r}"
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            known[program](rest)
        if target:
            (self.folder / target.split()[0]).write_text(said.getvalue())

    def make(self, rest):
        """Its targets exist."""
        targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in rest if "=" not in word and not word.startswith("-")} <= set(targets), rest

    def git(self, rest):
        """Clones come from the project's home."""
        if rest[0] == "clone":
            assert rest[1] in (HOME, f"{HOME}.git"), rest

    def pip(self, rest):
        """Extras of this project exist, and all else can be read as a requirement."""
        assert rest[0] == "install", rest
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for word in rest[1:]:
            own = re.fullmatch(r"(?:\.|jaxmask)(?:\[(.*)\])?", word)
            if own is not None:
                extras = set((own[1] or "").split(",")) - {""}
                assert extras <= set(project["optional-dependencies"]), word
            elif not word.startswith("-"):
                Requirement(word)

    def python(self, rest):
        """A module, a script of the repository, or a line of code."""
        if rest[0] == "-c":
            exec(compile(rest[1], "-c", "exec"), {})
        elif rest[0] == "-m":
            known = {"train": self.train, "serve": self.serve, "jaxmask": self.jaxmask, "pip": self.pip}
            known |= {"pytest": self.pytest, "venv": lambda rest: None, "build": lambda rest: None}
            known[rest[1]](rest[2:])
        else:
            self.script(rest)

    def script(self, rest):
        """It exists and has the options."""
        path = ROOT / rest[0]
        assert path.is_file(), rest[0]
        siblings = {f"{name}.py" for name in re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE)}
        files = [path, *(file for name in siblings if (file := path.parent / name).is_file())]
        options = {
            node.value
            for file in files
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= options, rest

    def pytest(self, rest):
        """The files exist."""
        for word in rest:
            assert not word.startswith("tests/") or (ROOT / word.partition("::")[0]).exists(), word

    def train(self, rest):
        """The configuration of the run; what resumes one is read, and what helps ends well."""
        if "--resume" in rest:
            where, overrides = train.cli._parser().parse_known_args(rest)
            assert where.resume
            train.cli._what_may_change(overrides)
            return
        words = shlex.split(OF_PROCESSES.sub("", shlex.join(rest)))
        if not {"--help", "--report"} & set(words):
            words.append("--print-config")
        with _help_ends_well(), contextlib.chdir(self.folder):
            assert train.cli.main(words) == 0, rest

    def serve(self, rest):
        """The options of the server, or of the offline command."""
        kind = GenerateOptions if rest[0] == "generate" else ServerOptions
        with _help_ends_well():
            serve.cli._parsed(kind, "python -m serve", rest[rest[0] == "generate" :])

    def vllm(self, rest):
        """It is not at hand; the options are those with which tests/data/make_vllm_tiny.py recorded its answers."""
        recorded = (ROOT / "tests/data/make_vllm_tiny.py").read_text()
        assert rest[0] == "serve", rest
        assert all(word in recorded for word in rest[2:]), rest

    def jaxmask(self, rest):
        """An audit of rollouts at hand: fit to train on or not, but understood."""
        from jaxmask.__main__ import main
        from jaxmask.audit.files import FORMS

        if "--form" in rest:
            # The file is of another form, so the form is only looked at.
            place = rest.index("--form")
            assert rest[place + 1] in FORMS, rest
            rest = rest[:place] + rest[place + 2 :]
        words = [str(self.file()) if re.search(r"\.(jsonl|json|npz|gz)$", word) else word for word in rest]
        with contextlib.chdir(self.folder):
            assert main(words) in (0, 1), rest

    def curl(self, rest):
        """The request, answered with 200."""
        method, body, headers, url = None, None, {}, None
        words = iter(rest)
        for word in words:
            if word in ("-X", "--request"):
                method = next(words)
            elif word in ("-d", "--data"):
                body = next(words)
            elif word in ("-H", "--header"):
                name, _, value = next(words).partition(": ")
                headers[name] = value
            elif not word.startswith("-"):
                url = word
        assert url.startswith(ADDRESS), url
        body = None if body is None else body.replace("/runs/1", str(self.folder / "runs/1"))
        method = method or ("GET" if body is None else "POST")
        response = httpx.request(method, url.replace(ADDRESS, self.url()), content=body, headers=headers, timeout=300)
        assert response.status_code == 200, response.text

    def check_script(self, code: str) -> None:
        """A script that `bash` has read: its command lines of `python -m train`, with something for each variable."""
        joined = code.replace("\\\n", " ")
        texts = re.findall(r'"(--(?:preset|resume)[^"]*)"', joined)
        texts += re.findall(r"python -m train ([^\"&\n]*)", joined)
        assert texts, "a script that trains nothing"
        for text in texts:
            filled = VARIABLE.sub("1", text.replace("$WHAT", ""))
            self.train(shlex.split(filled, comments=True))

    def check_yaml(self, code: str) -> None:
        """Each document is read, and the scripts in it are tried."""
        for document in yaml.safe_load_all(code):
            for text in _texts(document):
                if "python -m train" in text:
                    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
                    self.check_script(text)


@contextlib.contextmanager
def _help_ends_well():
    """A command that prints its help ends the program; with 0, all is well."""
    try:
        yield
    except SystemExit as stop:
        if stop.code:
            raise


def _texts(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)
