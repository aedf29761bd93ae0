"""Good rollouts, and files of them in every form that the audit reads.

Known logits give the supports, the supports the log-probabilities: everything fits together. No two logits of a token
are equal, and no filter cuts within rounding.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

VOCAB_SIZE = 300


@dataclasses.dataclass(frozen=True)
class GoodRow:
    """One completion.

    Attributes:
      prompt_ids: of its prompt.
      token_ids: drawn from the supports.
      supports: ascending ids.
      logprobs: of each token over its support, rounded to float32.
      full_logprobs: over the vocabulary, at the temperature.
      kept_logprobs: of all ids of each support.
      logits: [T, V] before temperature.
      temperature, top_k, top_p, min_p: what it was sampled with.
      loss_mask: which tokens train; None where all do.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    supports: list[list[int]]
    logprobs: list[float]
    full_logprobs: list[float]
    kept_logprobs: list[list[float]]
    logits: np.ndarray
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    loss_mask: list[bool] | None = None

    @property
    def sampling_params(self) -> dict[str, Any]:
        """The settings as a request states them."""
        names = ("temperature", "top_k", "top_p", "min_p")
        return {name: getattr(self, name) for name in names} | {"logprobs": 0}


def good_rows(
    num_prompts: int = 3,
    group_size: int = 2,
    length: int = 12,
    *,
    seed: int = 0,
    temperature: float = 0.8,
    top_k: int = 24,
    top_p: float = 0.9,
    min_p: float = 0.002,
) -> list[GoodRow]:
    """Rows of groups side by side; lengths differ a little. Equal arguments make equal rows."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(num_prompts):
        prompt = random.integers(0, VOCAB_SIZE, random.integers(4, 9)).tolist()
        first = 3 * random.standard_normal(VOCAB_SIZE)
        for member in range(group_size):
            logits = (3 * random.standard_normal((length - member % 3, VOCAB_SIZE))).astype(np.float32)
            # One policy, one prompt, one distribution of the first token.
            logits[:1] = first
            rows.append(_row(random, prompt, logits, temperature, top_k, top_p, min_p))
    return rows


def _row(
    random: np.random.Generator,
    prompt: list[int],
    logits: np.ndarray,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> GoodRow:
    tokens, supports, logprobs, full, kept = [], [], [], [], []
    for values in logits.astype(np.float64) / temperature:
        order = np.argsort(-values)
        # In the order of the filters: min-p, top-k, top-p over what these two left.
        size = int((values >= values.max() + np.log(min_p)).sum()) if min_p else len(values)
        order = order[: min(size, top_k) if top_k > 0 else size]
        mass = np.exp(values[order] - values.max())
        before = np.cumsum(mass) / mass.sum() - mass / mass.sum()
        support = np.sort(order[before < top_p])
        over = values[support] - np.logaddexp.reduce(values[support])
        drawn = int(random.choice(len(support), p=np.exp(over)))
        tokens.append(int(support[drawn]))
        supports.append(support.tolist())
        logprobs.append(_rounded(over[drawn]))
        full.append(_rounded(values[support[drawn]] - np.logaddexp.reduce(values)))
        kept.append([_rounded(value) for value in over])
    return GoodRow(prompt, tokens, supports, logprobs, full, kept, logits, temperature, top_k, top_p, min_p)


def _rounded(value: float) -> float:
    return float(np.float32(value))


def vllm_choice(row: GoodRow, index: int = 0) -> dict[str, Any]:
    """A choice as vLLM's token endpoint answers it."""
    entries = [
        {"token_id": token, "logprob": value, "rank": 1, "top_logprobs": []}
        for token, value in zip(row.token_ids, row.logprobs, strict=True)
    ]
    return {
        "index": index,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": row.token_ids,
        "routed_experts": None,
        "sampling_mask": row.supports,
        "logprobs": {"content": entries},
    }


def vllm_records(rows: Sequence[GoodRow]) -> list[dict[str, Any]]:
    """Requests and answers side by side, one completion each."""
    return [
        {
            "request": {"token_ids": row.prompt_ids, "sampling_params": row.sampling_params},
            "status": 200,
            "response": {"request_id": f"generate-tokens-{number}", "choices": [vllm_choice(row)]},
        }
        for number, row in enumerate(rows)
    ]


def write_lines(path: Path, records: Sequence[Any]) -> None:
    """JSON lines, compressed where the path ends in .gz."""
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def _write_vllm(path: Path, rows: Sequence[GoodRow]) -> None:
    write_lines(path, vllm_records(rows))


def _write_vllm_groups(path: Path, rows: Sequence[GoodRow]) -> None:
    """A request for each prompt, with n choices."""
    records = []
    for group in groups_of(rows):
        request = {"token_ids": group[0].prompt_ids, "sampling_params": group[0].sampling_params | {"n": len(group)}}
        choices = [vllm_choice(row, index) for index, row in enumerate(group)]
        records.append({"request": request, "status": 200, "response": {"choices": choices}})
    write_lines(path, records)


def _write_vllm_stream(path: Path, rows: Sequence[GoodRow]) -> None:
    records = []
    for row in rows:
        whole, events = vllm_choice(row), []
        for begin in range(0, len(row.token_ids), 5):
            part = slice(begin, begin + 5)
            delta = whole | {name: whole[name][part] for name in ("token_ids", "sampling_mask")}
            events.append({"choices": [delta | {"logprobs": {"content": whole["logprobs"]["content"][part]}}]})
        request = {"token_ids": row.prompt_ids, "sampling_params": row.sampling_params, "stream": True}
        records.append({"request": request, "status": 200, "stream": [*events, {"choices": []}, "[DONE]"]})
    write_lines(path, records)


def _write_vllm_bare(path: Path, rows: Sequence[GoodRow]) -> None:
    """Answers alone, which hold the prompt where a client asked for it."""
    write_lines(path, [{"prompt_token_ids": row.prompt_ids, "choices": [vllm_choice(row)]} for row in rows])


def groups_of(rows: Sequence[GoodRow]) -> list[list[GoodRow]]:
    """Rows of one prompt together; they lie side by side."""
    groups: list[list[GoodRow]] = []
    for row in rows:
        if groups and groups[-1][0].prompt_ids == row.prompt_ids:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to write rollouts down.

    Attributes:
      form: what `files.read` calls it.
      suffix: of the file's name.
      write: writes rows to a path.
      has_settings, has_groups, has_full, has_kept, has_logits: what of a row it holds.
    """

    form: str
    suffix: str
    write: Callable[[Path, Sequence[GoodRow]], None]
    has_settings: bool = True
    has_groups: bool = True
    has_full: bool = False
    has_kept: bool = False
    has_logits: bool = False


VARIANTS: dict[str, Variant] = {
    "vllm": Variant("vllm", ".jsonl", _write_vllm),
    "vllm-gz": Variant("vllm", ".jsonl.gz", _write_vllm),
    "vllm-groups": Variant("vllm", ".jsonl", _write_vllm_groups),
    "vllm-stream": Variant("vllm", ".jsonl", _write_vllm_stream),
    "vllm-bare": Variant("vllm", ".jsonl", _write_vllm_bare, has_settings=False),
}
