"""One of the processes of `test_processes`: python process_worker.py FOLDER PORT ID.

What it finds out goes to FOLDER/found-ID.json.
"""

import json
import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from models import MeshRules, make_mesh
from train import cli, processes, run
from train.config import GRPOConfig
from train.data_config import DataConfig
from train.loop import DeviceLoop
from train.run_config import RunConfig, SavingConfig
from train.tasks import TextTask

NUM_PROCESSES = 2
MESH = "data=2,fsdp=2"
STOP_AFTER = 3
SORT = RunConfig(
    preset="sort-tiny",
    # Never reached: SIGTERM ends the run.
    iterations=1000,
    mesh=MESH,
    grpo=GRPOConfig(num_prompts=4, group_size=4, max_new_tokens=3, top_k=4, top_p=0.9, learning_rate=1e-3),
    data=DataConfig(task="sort", task_options=("num_digits=3",)),
    saving=SavingConfig(checkpoint_every=2),
)
HOST = """--preset smollm2-arithmetic --iterations 3 --num-prompts 4 --group-size 2 --max-new-tokens 3 --top-k 8
--num-micro-batches 1 --eval-every 2 --eval-prompts 4 --eval-samples 0 --sample-every 2 --overlap
--checkpoint-every 1"""
LOST = "the rewards of the second iteration are lost"


class OwnError(Exception):
    """No other process can make one from its pickle: it takes two arguments."""

    def __init__(self, one: int, other: int):
        super().__init__(f"{one} and {other}")


def told(compute):
    try:
        return compute()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def host_task(folder: Path, cluster: list[str]) -> dict:
    """A run whose rewards raise in the first process, at the second iteration."""
    score, calls = TextTask.score, []

    def lost(self, *arguments):
        calls.append(arguments)
        # The evaluation, the first iteration, the second.
        if len(calls) == 3:
            raise ValueError(LOST)
        return score(self, *arguments)

    TextTask.score = lost
    options = [*HOST.split(), "--mesh", MESH, "--model", str(folder / "text"), "--out", str(folder / "host")]
    code = cli.main([*options, *cluster])
    TextTask.score = score
    return {"exit code": code, "num scored": len(calls)}


def together() -> dict:
    """What each of `train.processes` gives here."""
    first = processes.is_first()

    def raise_own():
        raise OwnError(1, 2)

    def raise_in_the_other():
        if not first:
            raise OSError("disk full")
        return "done"

    rules = MeshRules(make_mesh(data=2, fsdp=2))
    values = np.arange(8, dtype=np.float32).reshape(4, 2)
    placed = processes.to_devices({"x": values, "key": jax.random.key(7)}, rules)
    cut = jax.jit(jnp.copy, out_shardings=NamedSharding(rules.mesh, PartitionSpec("data", "fsdp")))(placed["x"])
    whole = processes.to_the_first({"x": cut})
    return {
        "value": processes.by_the_first(lambda: {"process": jax.process_index(), "long": "x" * 5000})["process"],
        "own error": told(lambda: processes.by_the_first(raise_own)),
        "error of one": told(lambda: processes.in_all(raise_in_the_other)),
        "any": [processes.any_of(not first), processes.any_of(False)],
        "held here": [shard.data.shape for shard in cut.addressable_shards],
        "whole": processes.to_host({"x": cut})["x"].tolist(),
        "of the first": whole and whole["x"].tolist(),
        "draw": float(jax.random.uniform(placed["key"])),
    }


def stopped_sort(folder: Path) -> None:
    """A run that ends by SIGTERM, which only the second process gets."""
    iterate = DeviceLoop.iterate

    def signalled(self, state, step, look=None):
        if step + 1 == STOP_AFTER and not processes.is_first():
            os.kill(os.getpid(), signal.SIGTERM)
        return iterate(self, state, step, look)

    DeviceLoop.iterate = signalled
    run.start(SORT, folder / "sort", Console(quiet=not processes.is_first()))


def main(folder: Path, port: str, process_id: str) -> None:
    cluster = ["--coordinator", f"localhost:{port}", "--num-processes", str(NUM_PROCESSES), "--process-id", process_id]
    found = {"host": host_task(folder, cluster), "together": together()}
    found["one device"] = told(lambda: run.start(RunConfig("sort-tiny", 1), folder / "refused", Console(quiet=True)))
    stopped_sort(folder)
    (folder / f"found-{process_id}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
