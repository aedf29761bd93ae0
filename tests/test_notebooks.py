"""Every notebook runs from top to bottom in a fresh kernel, shows what its text says, and is committed with outputs."""

import copy
import json
import os
import re
from pathlib import Path

import nbformat
import pytest

from demos import execute

ROOT = Path(__file__).parents[1]
PATHS = execute.notebooks()
NAMES = [path.stem for path in PATHS]
COLAB = "https://colab.research.google.com/github/jaxmask/jaxmask/blob/main/demos/"
REPOSITORY = "https://github.com/jaxmask/jaxmask/blob/main/"
# What a reader is told in words: names of a notebook's variables, and where their values must lie.
TOLD = {
    "01_what_truncation_does": {
        "max_ratio_error": (0, 1e-5),
        "counts.mean()": (7, 10),
        "np.median(counts)": (2, 2),
        "np.mean(counts == 1)": (0.35, 0.5),
        "kept_mass.min()": (0.97, 1),
        "ratio_full[:256].prod()": (0.01, 0.03),
        "np.mean(of_texts < 1 - 3e-4)": (1, 1),
        "np.mean(top_p_mass < 0.8)": (0.11, 0.18),
        "np.mean(top_k_mass < 0.8)": (0.01, 0.05),
        "np.abs(full[~is_kept]).min()": (1e-4, 1),
        "np.abs(on_support[~is_kept]).max()": (0, 0),
    },
    "02_sampler_and_supports": {
        "num_compiled": (0, 0),
        "one_id_share": (0.05, 0.2),
        "counts.max()": (2, 50),
        "answers[0].outputs[0].sampling_mask.counts.mean()": (1, 8),
        "answers[3].outputs[0].sampling_mask.counts.max()": (5, 5),
        "answers[7].outputs[0].sampling_mask.counts.mean()": (20, 50),
        "max(logprob[token].logprob for token, logprob in zip(answer.token_ids, answer.logprobs))": (-1e-6, 1e-6),
    },
    "03_grpo_in_one_program": {
        "max_ratio_error": (0, 1e-5),
        "final_reward": (0.8, 1),
        "curves['reward'][:5].mean()": (0, 0.2),
        "curves['error over the vocabulary'].min()": (0.05, 1),
        "curves['support size'][0]": (6, 8),
        "curves['support size'][-20:].mean()": (1, 2),
        "has_callback": (False, False),
        "'callback' in str(trace.jaxpr)": (False, False),
    },
    "04_support_loss_in_your_model": {
        "max_ratio_error": (0, 1e-5),
        "gradient_error": (0, 1e-4),
        "time_ratio": (3, 1000),
        "memory_ratio": (8, 1000),
        "frozen_ratio": (50, 1e5),
        "np.abs(gradients['on supports']['head'][outside]).max()": (0, 0),
        "scores.kl.min()": (-1e-6, 1),
    },
    "05_grpo_on_gemma_or_qwen": {
        "max_ratio_error": (0, 1e-5),
        "rows[0]['rewards/mean']": (0, 0.3),
        "rows[-1]['rewards/mean']": (0.7, 2),
        "rows[-1]['rewards/digits']": (0.7, 1),
        "rows[-1]['rewards/num_failed']": (0, 0),
        "rows[-1]['support/size_mean']": (1, 12),
        "len(looks)": (2, 2),
    },
}
NUM_PICTURES = dict(zip(NAMES, (5, 1, 1, 1, 1), strict=True))
MACHINE = re.compile(r"/(tmp|work|root|home|usr|content|opt)\b|site-packages| at 0x[0-9a-f]+|Warning|Traceback")


@pytest.fixture(scope="module", params=PATHS, ids=NAMES)
def committed(request):
    return request.param.stem, nbformat.read(request.param, as_version=4)


def kernel_environment():
    """A reader's one device; of these tests' own flags for XLA, those alone that make it compile in less time."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}


@pytest.mark.slow
def test_it_runs_and_shows_what_its_text_says(committed):
    name, notebook = committed
    notebook = copy.deepcopy(notebook)
    for cell in notebook.cells:
        cell.pop("outputs", None)
        if cell.cell_type == "code":
            cell["outputs"], cell["execution_count"] = [], None
    values = ", ".join(f"{expression!r}: float({expression})" for expression in TOLD[name])
    notebook.cells.append(nbformat.v4.new_code_cell(f"import json\nprint(json.dumps({{{values}}}))"))
    ran = execute.run_cells(notebook, kernel_environment())
    found = json.loads(ran.cells[-1].outputs[0].text)
    for expression, (low, high) in TOLD[name].items():
        assert low <= found[expression] <= high, f"{expression} is {found[expression]}"
    assert execute.num_pictures(ran) == NUM_PICTURES[name]
    assert not MACHINE.search(execute.text_of(ran))


def test_every_notebook_is_told_of():
    assert list(TOLD) == NAMES


def test_it_is_committed_with_the_outputs_of_one_run_from_top_to_bottom(committed):
    name, notebook = committed
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert execute.num_pictures(notebook) == NUM_PICTURES[name]
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert all(output.name == "stdout" for output in outputs if output.output_type == "stream")
    assert not MACHINE.search(execute.text_of(notebook))
    assert (execute.DEMOS / f"{name}.ipynb").stat().st_size < 1e6


def test_it_is_as_a_run_leaves_it(committed):
    _, notebook = committed
    assert execute.normalised(copy.deepcopy(notebook)) == notebook


def test_it_opens_with_its_own_badge_a_title_and_the_same_setup(committed):
    name, notebook = committed
    first = notebook.cells[0].source
    assert first.startswith(
        f"[![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)]({COLAB}{name}.ipynb)"
    )
    assert re.search(r"^# \S", first, re.MULTILINE)
    assert len(first.split("\n\n")) == 3, "badge, title, one paragraph"
    setup = nbformat.read(PATHS[0], as_version=4).cells[1].source
    assert notebook.cells[1].source == setup
    assert "git clone" in setup
    assert "%run jaxmask-main/demos/setup_colab.py" in setup


def test_its_links_to_this_project_lead_somewhere(committed):
    _, notebook = committed
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\((https?:[^)]*)\)", text):
        if target.startswith(REPOSITORY):
            assert (ROOT / target.removeprefix(REPOSITORY)).is_file(), target
        elif target.startswith(COLAB):
            assert (ROOT / "demos" / target.removeprefix(COLAB)).is_file(), target
        else:
            assert target.startswith(("https://arxiv.org/", "https://colab.research.google.com/assets/")), target


def test_cells_are_short(committed):
    _, notebook = committed
    for cell in notebook.cells:
        assert cell.source.count("\n") < 40, cell.source
        assert max(map(len, cell.source.split("\n"))) <= (500 if cell.cell_type == "markdown" else 120)


def test_the_page_of_the_docs_names_them_all():
    page = (ROOT / "docs" / "notebooks.md").read_text()
    for name in NAMES:
        assert f"{COLAB}{name}.ipynb" in page
        assert (ROOT / "docs" / "images" / "notebooks" / f"{name}.png").is_file()
        assert f"images/notebooks/{name}.png" in page
