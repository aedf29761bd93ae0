"""The experiment on the sampling mask: held-out prompts, files of runs, tables, the picture; nothing is trained."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def experiment():
    """Scripts find each other in their own folder."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(BENCHMARKS))
    import keep_sampling_mask

    yield keep_sampling_mask
    patch.undo()


def fake_run(config, iterations, seed):
    """Rewards that say which run it is."""
    row = dict.fromkeys(("ratio_mean", "ratio_std", "entropy", "clip_fraction", "grad_norm", "max_ratio_error"), 1.0)
    row |= {"reward": config.top_p + (0.25 if config.sampling_mask else 0) + seed / 100, "exact": 0.5}
    evaluated = ("exact/own", "exact/whole", "exact/greedy", "vocabulary_entropy", "kept_mass", "one_id_share")
    return [row] * (iterations - 1) + [row | dict.fromkeys(evaluated, 0.5)]


def test_training_never_sees_held_out_prompts(experiment):
    prompts = experiment.TASK.prompts(jax.random.key(0), 512).token_ids
    digits = np.asarray(prompts)[:, : experiment.NUM_DIGITS]
    assert (digits.sum(axis=1) % experiment.HELD_OUT != 0).all()
    assert ((digits >= 0) & (digits <= 9)).all()
    # Seven in eight are as SortDigits draws them.
    drawn = np.asarray(super(experiment.Sorting, experiment.TASK).prompts(jax.random.key(0), 512).token_ids)
    assert 0.05 < (prompts != drawn).any(axis=1).mean() < 0.2
    held_out = experiment.TASK.held_out(64)
    assert held_out.token_ids.shape == (64, experiment.NUM_DIGITS + 1)
    assert (np.asarray(held_out.token_ids)[:, : experiment.NUM_DIGITS].sum(axis=1) % experiment.HELD_OUT == 0).all()


def test_arms_differ_in_what_they_say(experiment):
    found = experiment.arms(500)
    assert len(found) == 8
    assert {(config.sampling_mask, config.tis_cap) for config in found.values()} == {
        (True, None),
        (False, None),
        (False, 2.0),
    }
    assert all(config.top_p == top_p for (_, top_p), config in found.items())


def test_the_mean_of_three_has_a_known_interval(experiment):
    mean, half = experiment.report.interval([1.0, 2.0, 3.0])
    # Deviation 1, t = 4.303 with two degrees of freedom.
    assert (mean, half) == (2.0, pytest.approx(4.303 / 3**0.5))
    assert experiment.report.interval([1.0]) == (1.0, float("inf"))


def test_an_interrupted_experiment_goes_on(experiment, tmp_path, monkeypatch, capsys):
    runs = []

    def counted(*settings):
        runs.append(settings)
        return fake_run(*settings)

    monkeypatch.setattr(experiment, "run", counted)
    arguments = ["--iterations", "4", "--seeds", "2", f"--folder={tmp_path}", f"--picture={tmp_path / 'p.png'}"]
    experiment.main(arguments)
    assert len(runs) == 16
    text = capsys.readouterr().out
    # supports - full at top-p 0.8: a quarter in each seed.
    assert "| reward, whole run | **+0.250** ± 0.000 | **+0.250** ± 0.000 | +0.000 ± 0.000 | " in text
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "4/full-0.9-1.jsonl").unlink()
    other = tmp_path / "4/supports-0.8-0.jsonl"
    first, *rows = other.read_text().splitlines()
    other.write_text("\n".join([json.dumps(json.loads(first) | {"digits": 6}), *rows]))
    experiment.main(arguments)
    assert [(config.sampling_mask, config.top_p, seed) for config, _, seed in runs[16:]] == [
        (True, 0.8, 0),
        (False, 0.9, 1),
    ]
    assert capsys.readouterr().out.endswith(text[text.index("### top-p 0.8") :])
