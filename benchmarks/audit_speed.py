"""How fast and in how much memory a file of a million tokens is audited: python benchmarks/audit_speed.py --form vllm

With --read, it is only read.

Rows of one line each, as an engine would answer them; a support holds 8 ids on average, as real ones do, and 46 % hold
one. The file is written first, by another process, so that its memory does not count here.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from jaxmask.audit import audit, files

VOCAB_SIZE = 151_936
FORMS = ("vllm", "vllm-base64", "sglang", "prime-rl", "prime-rl-base64", "miles", "miles-base64", "rollout")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--form", choices=FORMS, default="vllm")
    options.add_argument("--tokens", type=int, default=1_000_000)
    options.add_argument("--length", type=int, default=1000, help="tokens of a row")
    options.add_argument("--file", type=Path, help="where to write the file, which is kept; a temporary one by default")
    options.add_argument("--read", action="store_true", help="read it only, and check nothing")
    options.add_argument("--write", action="store_true", help="write it, and do no more")
    given = options.parse_args()
    if given.write:
        write(given.form, given.file, given.tokens // given.length, given.length)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = given.file or Path(folder) / f"rollouts.{'npz' if given.form == 'rollout' else 'jsonl'}"
        made = ("--form", given.form, "--tokens", str(given.tokens), "--length", str(given.length))
        subprocess.run([sys.executable, __file__, *made, "--file", str(path), "--write"], check=True)
        measure_reading(path, given.form) if given.read else measure(path, given.form)


def measure(path: Path, form: str) -> None:
    """The whole command but for the start of Python and JAX, with all of its reports."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin, begin_cpu = time.perf_counter(), time.process_time()
    result = audit(path, vocab_size=VOCAB_SIZE)
    reports = len(result.to_text()) + len(result.to_html()) + len(json.dumps(result.to_dict()))
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"{form}, {result.statistics.num_tokens} tokens in {result.statistics.num_rows} rows, "
        f"{result.statistics.sizes.mean:.1f} ids each, {path.stat().st_size / 1e6:.0f} MB, {result.verdict}: "
        f"{seconds:.1f} s ({cpu_seconds:.1f} s of a core), peak {peak / 1024:.0f} MiB ({before / 1024:.0f} before), "
        f"{reports / 1e3:.0f} kB of reports"
    )


def measure_reading(path: Path, form: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin, begin_cpu = time.perf_counter(), time.process_time()
    reading = files.read(path)
    num_tokens = num_ids = num_malformed = 0
    for rows in reading:
        num_tokens += len(rows.token_ids)
        num_ids += len(rows.support_ids)
        num_malformed += len(rows.malformed)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = path.stat().st_size / 1e6
    print(
        f"{form}, {num_tokens} tokens in rows of {num_tokens / reading.num_rows:.0f}, "
        f"{num_ids / num_tokens:.1f} ids each, {size:.0f} MB, {num_malformed} malformed: "
        f"{seconds:.1f} s ({cpu_seconds:.1f} s of a core), {size / seconds:.0f} MB/s, "
        f"peak {peak / 1024:.0f} MiB ({before / 1024:.0f} before)"
    )


def write(form: str, path: Path, num_rows: int, length: int) -> None:
    random = np.random.default_rng(0)
    if form == "rollout":
        write_rollout(path, random, num_rows, length)
        return
    with path.open("w") as file:
        for _ in range(num_rows):
            file.write(json.dumps(record(form, *row(random, length))) + "\n")


def row(random: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, ids of supports, sizes and log-probabilities."""
    sizes = np.where(random.random(length) < 0.46, 1, 2 + random.geometric(1 / 12, length))
    sizes = np.minimum(sizes, 50)
    # Ascending from a random id, by random steps.
    begins = np.repeat(np.cumsum(sizes) - sizes, sizes)
    steps = np.cumsum(random.integers(1, 1000, int(sizes.sum())))
    ids = np.repeat(random.integers(0, VOCAB_SIZE - 50 * 1000, length), sizes) + steps - steps[begins]
    tokens = ids[np.cumsum(sizes) - 1]
    logprobs = np.where(sizes == 1, 0.0, -random.random(length)).astype(np.float32).astype(np.float64)
    return tokens, ids, sizes, logprobs


def record(form: str, tokens: np.ndarray, ids: np.ndarray, sizes: np.ndarray, logprobs: np.ndarray) -> object:
    import base64

    def packed(values: np.ndarray, dtype: str) -> object:
        return base64.b64encode(values.astype(dtype).tobytes()).decode() if "base64" in form else values.tolist()

    offsets = np.concatenate([[0], np.cumsum(sizes)])
    supports = [part.tolist() for part in np.split(ids, offsets[1:-1])]
    token_ids, values = tokens.tolist(), logprobs.tolist()
    params = {"temperature": 1.0, "top_k": 50, "top_p": 0.97}
    # As they are told apart: rows of one prompt would be of one group.
    prompt = [int(token_id) for token_id in token_ids[:3]]
    if form.startswith("prime-rl"):
        mask = {"ids": packed(ids, "<i4"), "counts": packed(np.concatenate([[0] * 3, sizes]), "<i4")}
        flags, temperatures = [False] * 3 + [True] * len(token_ids), [1.0] * (3 + len(token_ids))
        sequence = {"token_ids": prompt + token_ids, "mask": flags, "logprobs": [0.0] * 3 + values}
        return {**sequence, "temperatures": temperatures, "env_name": "bench", "sampling_mask": mask}
    if form.startswith("miles"):
        mask = {
            "rollout_sampling_mask_ids": packed(ids, "<i4"),
            "rollout_sampling_mask_offsets": packed(offsets, "<i8"),
        }
        lengths = {"response_length": len(token_ids), "loss_mask": [1] * len(token_ids)}
        return {"tokens": prompt + token_ids, **lengths, "rollout_log_probs": packed(logprobs, "<f4"), **mask}
    if form == "sglang":
        triples = [[value - 0.05, token, None] for value, token in zip(values, token_ids, strict=True)]
        more = {"output_token_sampling_mask": supports, "output_token_sampling_logprobs": values}
        answer = {"output_ids": token_ids, "meta_info": {"output_token_logprobs": triples, **more}}
        return {"request": {"input_ids": prompt, "sampling_params": params}, "response": answer}
    entries = [
        {"token_id": token, "logprob": v, "rank": 1, "top_logprobs": [{"token_id": token, "logprob": v, "rank": 1}]}
        for token, v in zip(token_ids, values, strict=True)
    ]
    mask = {"token_ids": packed(ids, "<i4"), "offsets": packed(offsets, "<i4")} if "base64" in form else supports
    choice = {"index": 0, "token_ids": token_ids, "sampling_mask": mask, "logprobs": {"content": entries}}
    request = {"token_ids": prompt, "sampling_params": params}
    return {"request": request, "status": 200, "response": {"choices": [choice]}}


def write_rollout(path: Path, random: np.random.Generator, num_rows: int, length: int) -> None:
    tokens, ids, sizes, logprobs = row(random, num_rows * length)
    shape = (num_rows, length)
    np.savez(
        path,
        jaxmask_rollout=1,
        token_ids=tokens.reshape(shape).astype(np.int32),
        lengths=np.full(num_rows, length, np.int32),
        logprobs=logprobs.reshape(shape).astype(np.float32),
        support_ids=ids.astype(np.int32),
        support_counts=sizes.reshape(shape).astype(np.int32),
        group_size=1,
        sampling_temperature=np.ones(num_rows, np.float32),
    )


if __name__ == "__main__":
    main()
