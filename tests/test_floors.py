"""The shape of the house: what may import what, how long things get, what is documented."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("jaxmask", "models", "train", "serve")

# jaxmask from the ground up: a module imports only modules of lower floors.
ORDER = (
    (
        "jaxmask.audit.finding",
        "jaxmask.audit.histogram",
        "jaxmask.audit.rows",
        "jaxmask.audit.statistics",
        "jaxmask.bits",
        "jaxmask.draw",
        "jaxmask.gathered",
        "jaxmask.mass",
        "jaxmask.model",
        "jaxmask.params",
        "jaxmask.shards",
        "jaxmask.svg",
        "jaxmask.tables",
        "jaxmask.kernels.dispatch",
    ),
    (
        "jaxmask.answered",
        "jaxmask.audit.archives",
        "jaxmask.audit.charts",
        "jaxmask.audit.encodings",
        "jaxmask.audit.exchange",
        "jaxmask.audit.lines",
        "jaxmask.audit.logit_values",
        "jaxmask.audit.outcome",
        "jaxmask.audit.values",
        "jaxmask.checks",
        "jaxmask.filters",
        "jaxmask.placement",
        "jaxmask.ragged",
        "jaxmask.settings",
    ),
    (
        "jaxmask.audit.block",
        "jaxmask.audit.completion",
        "jaxmask.audit.events",
        "jaxmask.audit.prompt",
        "jaxmask.audit.report_json",
        "jaxmask.audit.report_text",
        "jaxmask.audit.requests",
        "jaxmask.kernels.triton",
        "jaxmask.batch",
        "jaxmask.candidates",
        "jaxmask.completions",
        "jaxmask.scores",
        "jaxmask.sglang_answers",
        "jaxmask.support",
        "jaxmask.trainer_batches",
        "jaxmask.vllm_answers",
    ),
    (
        "jaxmask.audit.check",
        "jaxmask.audit.displaced",
        "jaxmask.audit.logprob_checks",
        "jaxmask.audit.page",
        "jaxmask.audit.pieces",
        "jaxmask.audit.readers.miles",
        "jaxmask.audit.readers.prime_rl",
        "jaxmask.audit.readers.vllm",
        "jaxmask.audit.support_checks",
        "jaxmask.bisection",
        "jaxmask.drawn",
        "jaxmask.given_supports",
        "jaxmask.history",
        "jaxmask.ragged_support",
        "jaxmask.vocabulary",
        "jaxmask.kernels.compact.pallas_gpu",
        "jaxmask.kernels.compact.reference",
        "jaxmask.kernels.filter.records",
        "jaxmask.kernels.head.reference",
    ),
    (
        "jaxmask.audit.across",
        "jaxmask.audit.builder",
        "jaxmask.audit.logit_checks",
        "jaxmask.audit.readers.answer",
        "jaxmask.audit.readers.samples",
        "jaxmask.audit.readers.sglang",
        "jaxmask.audit.remarks",
        "jaxmask.audit.request_checks",
        "jaxmask.audit.tally",
        "jaxmask.by_columns",
        "jaxmask.by_rows",
        "jaxmask.edits",
        "jaxmask.logprobs",
        "jaxmask.rollout",
        "jaxmask.wire",
        "jaxmask.kernels.compact.api",
        "jaxmask.kernels.filter.pallas_gpu",
        "jaxmask.kernels.head.pallas_gpu",
    ),
    (
        "jaxmask.audit.filter_checks",
        "jaxmask.audit.measures",
        "jaxmask.received",
        "jaxmask.replay",
        "jaxmask.rollout_file",
        "jaxmask.state",
        "jaxmask.kernels.filter.reference",
        "jaxmask.kernels.head.api",
    ),
    (
        "jaxmask.audit.checks",
        "jaxmask.audit.readers.rollouts",
        "jaxmask.engines",
        "jaxmask.heads",
        "jaxmask.speculation",
        "jaxmask.kernels.filter.api",
    ),
    ("jaxmask.audit.files", "jaxmask.draft_model", "jaxmask.prompt_lookup", "jaxmask.sampling", "jaxmask.scoring"),
    ("jaxmask.audit.auditing", "jaxmask.policy", "jaxmask.recording"),
    ("jaxmask.audit.command", "jaxmask.decoding", "jaxmask.prompt"),
    ("jaxmask.__main__", "jaxmask.generate"),
    ("jaxmask.streaming",),
)
LIBRARY_NEEDS = {"jax", "numpy", "jaxtyping", "jaxmask"}
# What each folder may import of the others. `train` and `serve` are siblings and never meet.
MAY_IMPORT = {
    "jaxmask": {"jaxmask"},
    "models": {"jaxmask", "models"},
    "train": {"jaxmask", "models", "train"},
    "serve": {"jaxmask", "models", "serve"},
}
MAX_FILE_LINES = 250
MAX_KERNEL_FILE_LINES = 350
MAX_FUNCTION_LINES = 60
MAX_KERNEL_FUNCTION_LINES = 150


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Full names of everything a file imports, also inside functions; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_kernel(path: Path) -> bool:
    return "kernels" in path.parts


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_only_point_down(folder):
    allowed = MAY_IMPORT[folder]
    wrong = [
        f"{module_name(path)} imports {name}"
        for path in sources(folder)
        for name in imports(path)
        if name.split(".")[0] in set(FOLDERS) - allowed
    ]
    assert not wrong


def test_the_library_needs_jax_numpy_and_jaxtyping_alone():
    allowed = LIBRARY_NEEDS | set(sys.stdlib_module_names)
    wrong = [
        f"{module_name(path)} imports {name}"
        for path in sources("jaxmask")
        for name in imports(path)
        if name.split(".")[0] not in allowed
    ]
    assert not wrong


def test_floors_of_the_library():
    """Every module stands on a floor and imports from lower ones only, so there is no cycle."""
    floor = {name: height for height, names in enumerate(ORDER) for name in names}
    modules = {module_name(path): path for path in sources("jaxmask") if path.name != "__init__.py"}
    assert set(modules) == set(floor), "every module of jaxmask has its place in ORDER"
    wrong = []
    for name, path in modules.items():
        for imported in imports(path):
            # `from jaxmask.batch import SamplingBatch` names an object; `from jaxmask import bits` a module.
            target = imported if imported in floor else imported.rpartition(".")[0]
            if imported.split(".")[0] == "jaxmask" and not floor.get(target, len(ORDER)) < floor[name]:
                wrong.append(f"{name} imports {imported}")
    assert not wrong


def test_files_are_short():
    wrong = {
        module_name(path): lines
        for path in sources(*FOLDERS)
        if (lines := len(path.read_text().splitlines()))
        > (MAX_KERNEL_FILE_LINES if is_kernel(path) else MAX_FILE_LINES)
    }
    assert not wrong


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring: documenting more never makes it too long."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        lines -= function.body[0].end_lineno - function.body[0].lineno + 1
    return lines


def test_functions_are_short():
    wrong = {
        f"{module_name(path)}.{node.name}": code_lines(node)
        for path in sources(*FOLDERS)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and code_lines(node) > (MAX_KERNEL_FUNCTION_LINES if is_kernel(path) else MAX_FUNCTION_LINES)
    }
    assert not wrong


def public_definitions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        is_definition = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if is_definition and not node.name.startswith("_"):
            yield f"{prefix}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body, f"{prefix}.{node.name}")


def test_everything_public_is_documented():
    wrong = []
    for path in sources(*FOLDERS):
        tree = ast.parse(path.read_text())
        wrong += [] if ast.get_docstring(tree) else [module_name(path)]
        wrong += [
            name for name, node in public_definitions(tree.body, module_name(path)) if not ast.get_docstring(node)
        ]
    assert not wrong


def committed_texts() -> Iterator[tuple[Path, str]]:
    suffixes = {".py", ".toml", ".md", ".yml", ".yaml", ".ipynb", ".txt", ".cfg", ".json", ".jsonl", ".sh"}
    hidden = {".git", ".venv", "runs", "dist", "build", "__pycache__"}
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        is_text = path.suffix in suffixes or path.name == "Makefile"
        if is_text and path.is_file() and not any(part in hidden or part.startswith(".venv") for part in parts):
            yield path, path.read_text(errors="replace")


def test_nothing_names_the_machine_it_was_written_on():
    # Put together, so that this file does not name them.
    words = ["/" + "work/", "/" + "tmp/", "pypi" + ".org", "shared" + "/"]
    wrong = [
        f"{path.relative_to(ROOT)} holds {word}" for path, text in committed_texts() for word in words if word in text
    ]
    assert not wrong


def test_the_checks_see_what_they_look_for(tmp_path):
    """Each check above fails on a file that breaks its rule."""
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    import torch.nn\n    from jaxmask import bits\n\n\nclass A:\n    def g(self): ...\n")
    assert list(imports(bad)) == ["torch.nn", "jaxmask.bits"]
    tree = ast.parse(bad.read_text())
    assert [name for name, node in public_definitions(tree.body, "bad") if not ast.get_docstring(node)] == [
        "bad.f",
        "bad.A",
        "bad.A.g",
    ]
    assert code_lines(tree.body[0]) == 3
    documented = ast.parse('def f():\n    """One.\n\n    Two.\n    """\n    return 1\n').body[0]
    assert code_lines(documented) == 2
    assert "jaxmask.sampling" in {module_name(path) for path in sources("jaxmask")}
    assert any(path.name == "pyproject.toml" for path, _ in committed_texts())
