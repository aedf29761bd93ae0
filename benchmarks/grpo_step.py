"""A whole GRPO iteration, rollout and update, against Tunix and TRL: time, and what each process holds.

python benchmarks/grpo_step.py [--only tunix trl] [--sizes 2x4 8x8] [--vocab 32000] [--rounds 7]
    [--tunix-python PATH] [--trl-python PATH]

A Qwen3 of random weights (4 layers, D = 256, the head tied), float32. Prompts of 32 tokens, prompts x
completions as named, 64 new tokens each, none of which ends early; top-k 50, top-p 0.95, temperature 1; one update on
the whole batch, AdamW, no KL term; rewards are computed on the host from the ids. All sides have the same weights,
which is checked first.

Each side is a process of its own that waits without work while another runs; rounds go from side to side, every other
one backwards. Shown: the median seconds of an iteration; of its rollout, until the rewards are asked for, and the rest;
of processor time; the ratio; seconds of the first iteration, which compiles; and the largest resident memory in the
iterations after it, less what imports alone take. A side that cannot be imported is skipped.
"""

import argparse
import statistics
import sys
import time

from generate import check_weights, hub_folder, random_case, small_decoder
from generate_case import Case
from worker import Worker

MODULES = {"ours": "grpo_ours", "tunix": "rival_tunix_grpo", "trl": "rival_trl"}


def open_side(name: str, python: str, folder: str, case: Case, group_size: int) -> Worker | None:
    """None, and a line that says so, where it cannot run."""
    length = case.prompt_length + case.max_new_tokens
    try:
        return Worker(python, MODULES[name], folder, length, case=case.to_plain(), group_size=group_size)
    except RuntimeError as error:
        if "ModuleNotFoundError" not in str(error):
            raise
        print(f"{name} is skipped: {str(error).splitlines()[-1]}", flush=True)
        return None


def timed(side: Worker) -> dict[str, float]:
    """Seconds of an iteration, of its rollout, and of the processors."""
    before, begun = side.call("processor_seconds"), time.perf_counter()
    told = side.call("step")
    step = time.perf_counter() - begun
    return {"step": step, "rollout": told["rollout"], "processor": side.call("processor_seconds") - before}


def measure(sides: dict[str, Worker], case: Case, group_size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Of each side: first, step, rollout and processor in seconds; peak and libraries in MiB."""
    found = {}
    for name, side in sides.items():
        begun = time.perf_counter()
        told = side.call("step")
        found[name] = {"first": time.perf_counter() - begun}
        if told["num_tokens"] != case.num_tokens * group_size:
            raise ValueError(f"{name} sampled {told['num_tokens']} tokens, not {case.num_tokens * group_size}")
        # The second may compile once more, for arrays that lie where the first has put them.
        side.call("step")
        side.call("forget_peak")
    times: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for done in range(rounds):
        for name in list(sides)[:: 1 if done % 2 == 0 else -1]:
            times[name].append(timed(sides[name]))
    for name, side in sides.items():
        found[name] |= {kind: statistics.median(row[kind] for row in times[name]) for kind in times[name][0]}
        found[name] |= side.call("memory")
    return found


def show(size: str, found: dict[str, dict[str, float]]) -> None:
    ours = found["ours"]
    for name, values in found.items():
        cells = [
            f"{size}, {name}",
            f"{values['step']:.3f}",
            f"{values['rollout']:.3f}",
            f"{values['step'] - values['rollout']:.3f}",
            f"{values['processor']:.2f}",
            f"{values['step'] / ours['step']:.2f}x",
            f"{values['first']:.1f}",
            f"{values['peak'] - values['libraries']:.0f}",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("tunix", "trl"), default=("tunix", "trl"))
    parser.add_argument("--sizes", nargs="+", default=["2x4", "8x8"], help="prompts x completions of each")
    parser.add_argument("--vocab", type=int, default=32_000, help="ids of the model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tunix-python", default=sys.executable, help="a Python that has google-tunix")
    parser.add_argument("--trl-python", default=sys.executable, help="a Python that has TRL and torch")
    args = parser.parse_args(arguments)
    pythons = {"ours": sys.executable, "tunix": args.tunix_python, "trl": args.trl_python}
    decoder = small_decoder(args.vocab)
    with hub_folder(decoder) as folder:
        for size in args.sizes:
            num_prompts, group_size = map(int, size.split("x"))
            case = random_case(decoder, num_prompts)
            run_size(
                size, folder, {name: pythons[name] for name in ("ours", *args.only)}, case, group_size, args.rounds
            )


def run_size(size: str, folder: str, pythons: dict[str, str], case: Case, group_size: int, rounds: int) -> None:
    opened = {name: open_side(name, python, folder, case, group_size) for name, python in pythons.items()}
    sides = {name: side for name, side in opened.items() if side is not None}
    try:
        for name in sides:
            if name != "ours":
                check_weights(sides["ours"], sides[name], name, list(case.prompts[0]))
        found = measure(sides, case, group_size, rounds)
        print("\n| size | iteration, s | rollout | rest | processors, s | ours is faster by | first, s | MiB |")
        print("|---" * 8 + "|")
        show(size, found)
        compiled = sides["ours"].call("compiled")
        print("ours, compiled programs, MiB: " + ", ".join(f"{name} {size:.0f}" for name, size in compiled.items()))
    finally:
        for side in sides.values():
            side.close()


if __name__ == "__main__":
    main()
