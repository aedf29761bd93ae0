"""Good rollouts, and files of them in every form that the audit reads.

Known logits give the supports, the supports the log-probabilities: everything fits together. No two logits of a token
are equal, and no filter cuts within rounding.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
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
      more_params: settings besides those.
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
    more_params: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def sampling_params(self) -> dict[str, Any]:
        """The settings as a request states them."""
        names = ("temperature", "top_k", "top_p", "min_p")
        return {name: getattr(self, name) for name in names} | {"logprobs": 0, **self.more_params}


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
        # Not strict: faults are planted in rows.
        for token, value in zip(row.token_ids, row.logprobs or [], strict=False)
    ]
    return {
        "index": index,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": row.token_ids,
        "routed_experts": None,
        "sampling_mask": row.supports,
        "logprobs": None if row.logprobs is None else {"content": entries},
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


def _write_vllm_base64(path: Path, rows: Sequence[GoodRow]) -> None:
    """As our own server answers with `sampling_mask_format: base64`."""
    records = vllm_records(rows)
    for record, row in zip(records, rows, strict=True):
        ids, offsets = csr(row)
        mask = {"token_ids": base64_of(ids, "<i4"), "offsets": base64_of(offsets, "<i4")}
        record["response"]["choices"][0]["sampling_mask"] = mask
    write_lines(path, records)


def _write_vllm_kept(path: Path, rows: Sequence[GoodRow]) -> None:
    """With log-probabilities of all ids, as builds of vLLM send them."""
    records = vllm_records(rows)
    for record, row in zip(records, rows, strict=True):
        more = {"sampling_mask_logprobs": row.kept_logprobs, "full_logprobs": row.full_logprobs}
        record["response"]["choices"][0] |= more
    write_lines(path, records)


def sglang_answer(row: GoodRow) -> dict[str, Any]:
    """An answer as SGLang's `/generate` gives it."""
    triples = [[value, token, None] for value, token in zip(row.full_logprobs, row.token_ids, strict=True)]
    return {
        "text": "",
        "output_ids": row.token_ids,
        "meta_info": {
            "id": "0",
            "finish_reason": {"type": "length", "length": len(row.token_ids)},
            "output_token_logprobs": triples,
            "output_token_sampling_mask": row.supports,
            "output_token_sampling_logprobs": row.logprobs,
            "output_token_sampling_mask_length": len(row.token_ids),
        },
    }


def _write_sglang(path: Path, rows: Sequence[GoodRow]) -> None:
    records = []
    for row in rows:
        request = {"input_ids": row.prompt_ids, "sampling_params": row.sampling_params}
        records.append({"request": request | {"return_sampling_mask": True}, "response": sglang_answer(row)})
    write_lines(path, records)


def _write_sglang_batch(path: Path, rows: Sequence[GoodRow]) -> None:
    """All prompts in one request, n answers for each; log-probabilities beside all ids alone."""
    groups = groups_of(rows)
    answers = [sglang_answer(row) for row in rows]
    for answer, row in zip(answers, rows, strict=True):
        answer["meta_info"]["output_token_sampling_logprobs"] = row.kept_logprobs
    params = [group[0].sampling_params | {"n": len(group)} for group in groups]
    request = {"input_ids": [group[0].prompt_ids for group in groups], "sampling_params": params}
    write_lines(path, [{"request": request, "response": answers}])


def _write_sglang_chat(path: Path, rows: Sequence[GoodRow]) -> None:
    records = []
    for group in groups_of(rows):
        answers = [sglang_answer(row) for row in group]
        choices = [
            {"index": index, "completion_token_ids": answer["output_ids"], "meta_info": answer["meta_info"]}
            for index, answer in enumerate(answers)
        ]
        request = {"messages": [{"role": "user", "content": "?"}], **group[0].sampling_params, "n": len(group)}
        records.append({"request": request, "status": 200, "response": {"choices": choices}})
    write_lines(path, records)


def prime_rl_sample(row: GoodRow) -> dict[str, Any]:
    """A training sample of prime-rl: the whole sequence, with lists."""
    before = [0] * len(row.prompt_ids)
    total = len(row.prompt_ids) + len(row.token_ids)
    return {
        "token_ids": row.prompt_ids + row.token_ids,
        "mask": [False] * len(before) + (row.loss_mask or [True] * len(row.token_ids)),
        "logprobs": [0.0] * len(before) + row.logprobs,
        "temperatures": [row.temperature] * total,
        "env_name": "test",
        "sampling_mask": {
            "ids": [token_id for support in row.supports for token_id in support],
            "counts": before + [len(support) for support in row.supports],
            "logprobs": [value for values in row.kept_logprobs for value in values],
        },
    }


def _write_prime_rl(path: Path, rows: Sequence[GoodRow]) -> None:
    write_lines(path, [prime_rl_sample(row) for row in rows])


def _write_prime_rl_fields(path: Path, rows: Sequence[GoodRow]) -> None:
    """Fields in their order, arrays as base64, which is what msgspec makes of bytes."""
    records = []
    for row in rows:
        sample = prime_rl_sample(row)
        mask = sample["sampling_mask"]
        packed = [
            base64_of(mask[name], dtype) for name, dtype in (("ids", "<i4"), ("counts", "<i4"), ("logprobs", "<f4"))
        ]
        first = [sample[name] for name in ("token_ids", "mask", "logprobs", "temperatures", "env_name")]
        records.append([*first, *[None] * 8, packed])
    write_lines(path, records)


def _write_prime_rl_npz(path: Path, rows: Sequence[GoodRow]) -> None:
    arrays: dict[str, Any] = {}
    for number, row in enumerate(rows):
        sample = prime_rl_sample(row)
        mask = sample["sampling_mask"]
        for name in ("token_ids", "mask", "logprobs", "temperatures"):
            arrays[f"{name}_{number}"] = np.array(sample[name])
        for name, dtype in (("ids", "<i4"), ("counts", "<i4"), ("logprobs", "<f4")):
            arrays[f"sampling_mask_{name}_{number}"] = np.array(mask[name], dtype)
    np.savez(path, **arrays)


def miles_sample(row: GoodRow, index: int) -> dict[str, Any]:
    """A sample of Miles, with lists."""
    ids, offsets = csr(row)
    return {
        "group_index": index,
        "status": "completed",
        "tokens": row.prompt_ids + row.token_ids,
        "response": "",
        "response_length": len(row.token_ids),
        "loss_mask": [int(trains) for trains in row.loss_mask or [True] * len(row.token_ids)],
        "rollout_log_probs": row.logprobs,
        "rollout_sampling_mask_ids": ids,
        "rollout_sampling_mask_offsets": offsets,
        "rollout_sampling_mask_log_probs": [value for values in row.kept_logprobs for value in values],
        "sampling_params": row.sampling_params,
    }


def _miles_samples(rows: Sequence[GoodRow]) -> list[dict[str, Any]]:
    return [miles_sample(row, number) for number, group in enumerate(groups_of(rows)) for row in group]


def _write_miles(path: Path, rows: Sequence[GoodRow]) -> None:
    write_lines(path, _miles_samples(rows))


def _write_miles_base64(path: Path, rows: Sequence[GoodRow]) -> None:
    samples = _miles_samples(rows)
    for sample in samples:
        for name, dtype in _MILES_ARRAYS.items():
            sample[name] = base64_of(sample[name], dtype)
    write_lines(path, samples)


def _write_miles_batch(path: Path, rows: Sequence[GoodRow]) -> None:
    """A batch for training on one line; it says nothing of the settings."""
    samples = _miles_samples(rows)
    names = {name: name for name in ("tokens", "group_index", *_MILES_ARRAYS)}
    names |= {"response_length": "response_lengths", "loss_mask": "loss_masks"}
    write_lines(path, [{plural: [sample[name] for sample in samples] for name, plural in names.items()}])


def _write_miles_npz(path: Path, rows: Sequence[GoodRow]) -> None:
    arrays: dict[str, Any] = {}
    for number, sample in enumerate(_miles_samples(rows)):
        for name in ("tokens", "response_length", "loss_mask"):
            arrays[f"{name}_{number}"] = np.array(sample[name])
        for name, dtype in _MILES_ARRAYS.items():
            arrays[f"{name}_{number}"] = np.array(sample[name], dtype)
    np.savez(path, **arrays)


_MILES_ARRAYS = {
    "rollout_log_probs": "<f4",
    "rollout_sampling_mask_ids": "<i4",
    "rollout_sampling_mask_offsets": "<i8",
    "rollout_sampling_mask_log_probs": "<f4",
}


def _write_samples(path: Path, rows: Sequence[GoodRow]) -> None:
    """What our trainer writes, without the texts."""
    records = [
        {"step": 0, "token_ids": row.token_ids, "logprobs": row.logprobs, "sampling_mask": row.supports} for row in rows
    ]
    write_lines(path, records)


def _write_answer(path: Path, rows: Sequence[GoodRow]) -> None:
    """An answer of our server as an archive: the rows of one prompt, whatever theirs are."""
    response = np.frombuffer(json.dumps({"choices": [], "prompt_token_ids": None}).encode(), np.uint8)
    arrays: dict[str, Any] = {"response": response}
    for number, row in enumerate(rows):
        ids, offsets = csr(row)
        arrays[f"token_ids_{number}"] = np.array(row.token_ids, "<i4")
        arrays[f"mask_ids_{number}"] = np.array(ids, "<i4")
        arrays[f"mask_offsets_{number}"] = np.array(offsets, "<i4")
        arrays[f"logprobs_{number}"] = np.array(row.logprobs, "<f4")
    np.savez(path, **arrays)


def rollout_arrays(rows: Sequence[GoodRow]) -> dict[str, Any]:
    """The arrays of a whole rollout, as far as the audit reads them."""
    shape = (len(rows), max(len(row.token_ids) for row in rows))
    ids = [token_id for row in rows for support in row.supports for token_id in support]
    kept = [value for row in rows for values in row.kept_logprobs for value in values]
    params = {name: np.array([getattr(row, name) for row in rows]) for name in ("temperature", "top_p", "min_p")}
    prompts = [group[0].prompt_ids for group in groups_of(rows)]
    return {
        "jaxmask_rollout": 1,
        "prompt_ids": _padded(prompts, (len(prompts), max(map(len, prompts))), np.int32),
        "prompt_lengths": np.array([len(prompt) for prompt in prompts], np.int32),
        "sampling_allowed_token_ids": _allowed(rows),
        "token_ids": _padded([row.token_ids for row in rows], shape, np.int32),
        "lengths": np.array([len(row.token_ids) for row in rows], np.int32),
        "logprobs": _padded([row.logprobs for row in rows], shape, np.float32),
        "full_logprobs": _padded([row.full_logprobs for row in rows], shape, np.float32),
        "kept_logprobs": np.array(kept, np.float32),
        "logits": _padded([row.logits for row in rows], (*shape, VOCAB_SIZE), np.float32),
        "support_ids": np.array(ids, np.int32),
        "support_counts": _padded([[len(support) for support in row.supports] for row in rows], shape, np.int32),
        "group_size": len(rows) // len(groups_of(rows)),
        "sampling_vocab_size": VOCAB_SIZE,
        "sampling_top_k": np.array([row.top_k if row.top_k > 0 else VOCAB_SIZE for row in rows], np.int32),
        **{f"sampling_{name}": values.astype(np.float32) for name, values in params.items()},
        "sampled_mask": _padded([row.loss_mask or [True] * len(row.token_ids) for row in rows], shape, np.bool_),
    }


def _write_rollout(path: Path, rows: Sequence[GoodRow]) -> None:
    np.savez(path, **rollout_arrays(rows))


def _padded(parts: Sequence[Any], shape: tuple[int, ...], dtype: type) -> np.ndarray:
    cells = np.zeros(shape, dtype)
    for row, part in enumerate(parts):
        cells[row, : len(part)] = part
    return cells


def _allowed(rows: Sequence[GoodRow]) -> np.ndarray:
    """Ids that each row may draw, filled up with V; of nothing else where it may draw any."""
    cells = np.full((len(rows), VOCAB_SIZE), VOCAB_SIZE, np.int32)
    for row, own in enumerate(rows):
        ids = own.more_params.get("allowed_token_ids", ())
        cells[row, : len(ids)] = ids
    return cells


def csr(row: GoodRow) -> tuple[list[int], list[int]]:
    """The ids of a row's supports one after another, and where each begins, with the total last."""
    ids = [token_id for support in row.supports for token_id in support]
    return ids, [0, *np.cumsum([len(support) for support in row.supports]).tolist()]


def base64_of(values: Sequence[float], dtype: str) -> str:
    """An array as text."""
    return base64.b64encode(np.array(values, dtype).tobytes()).decode()


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
      has_settings, has_groups, has_full, has_kept, has_logits: what of a row it holds. prime-rl's samples hold the
        temperature alone.
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
    "vllm-base64": Variant("vllm", ".jsonl", _write_vllm_base64),
    "vllm-kept": Variant("vllm", ".jsonl", _write_vllm_kept, has_full=True, has_kept=True),
    "sglang": Variant("sglang", ".jsonl", _write_sglang, has_full=True),
    "sglang-batch": Variant("sglang", ".jsonl", _write_sglang_batch, has_full=True, has_kept=True),
    "sglang-chat": Variant("sglang", ".jsonl", _write_sglang_chat, has_full=True),
    "prime-rl": Variant("prime-rl", ".jsonl", _write_prime_rl, has_settings=False, has_kept=True),
    "prime-rl-fields": Variant("prime-rl", ".jsonl", _write_prime_rl_fields, has_settings=False, has_kept=True),
    "prime-rl-npz": Variant("prime-rl", ".npz", _write_prime_rl_npz, has_settings=False, has_kept=True),
    "miles": Variant("miles", ".jsonl", _write_miles, has_kept=True),
    "miles-base64": Variant("miles", ".jsonl", _write_miles_base64, has_kept=True),
    "miles-batch": Variant("miles", ".jsonl", _write_miles_batch, has_settings=False, has_kept=True),
    "miles-npz": Variant("miles", ".npz", _write_miles_npz, has_settings=False, has_kept=True),
    "samples": Variant("samples", ".jsonl", _write_samples, has_settings=False, has_groups=False),
    "answer": Variant("answer", ".npz", _write_answer, has_settings=False, has_groups=False),
    "rollout": Variant("rollout", ".npz", _write_rollout, has_full=True, has_kept=True, has_logits=True),
}
