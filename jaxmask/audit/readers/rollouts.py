"""A whole rollout as `jaxmask.save_rollout` writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxmask.audit.completion import Completion, Cut
from jaxmask.audit.exchange import Exchange
from jaxmask.audit.rows import Setting
from jaxmask.audit.values import WHOLE_ROW, Problem, shown
from jaxmask.rollout_file import MARK, SAMPLING, VERSION


def knows(named: Any) -> bool:
    """Whether the arrays of an archive are a rollout."""
    return isinstance(named, Mapping) and MARK in named


def completions(exchange: Exchange) -> Iterator[Completion]:
    """One row for each completion."""
    named = exchange.answer
    problems: list[Problem] = []
    tokens, lengths = _whole(named, "token_ids", 2, problems), _whole(named, "lengths", 1, problems)
    if tokens is None or lengths is None or len(lengths) != len(tokens):
        problems.append(Problem(WHOLE_ROW, "lengths", "there must be one for each row of token_ids"))
        yield Completion(exchange.where.name(), [], [], [], problems=tuple(problems))
        return
    counts = _whole(named, "support_counts", 2, problems)
    ids = _whole(named, "support_ids", 1, problems)
    begins = _begins(counts, ids, tokens.shape, problems)
    kept = named.get("kept_logprobs")
    vocab_size = _vocab_size(named)
    for row in range(len(tokens)):
        length = int(lengths[row])
        if not 0 <= length <= tokens.shape[1]:
            text = f"{length} is outside of [0, {tokens.shape[1]}]"
            problems.append(Problem(WHOLE_ROW, "lengths", text))
            length = min(max(length, 0), tokens.shape[1])
        pool = slice(0, 0) if begins is None else slice(begins[row, 0], begins[row, length])
        if begins is not None and begins[row, length] != begins[row, -1]:
            problems.append(Problem(length, "support_counts", "supports stand behind the last token"))
        supports = None
        if begins is not None and ids is not None:
            supports = Cut(ids[pool], counts=np.diff(begins[row, : length + 1]))
        yield Completion(
            exchange.where.name(row),
            tokens[row, :length],
            supports=supports,
            logprobs=_cells(named, "logprobs", row, length, tokens.shape, problems),
            full_logprobs=_cells(named, "full_logprobs", row, length, tokens.shape, problems),
            kept_logprobs=kept[pool] if isinstance(kept, np.ndarray) and kept.ndim == 1 else None,
            logits=_cells(named, "logits", row, length, tokens.shape, problems),
            loss_mask=_cells(named, "sampled_mask", row, length, tokens.shape, problems),
            setting=_setting(named, row),
            group=_group(named, row),
            prompt_ids=_prompt(named, row),
            vocab_size=vocab_size,
            problems=(*problems, *_unknown(named)),
        )
        problems = []


def _unknown(named: Mapping[str, Any]) -> list[Problem]:
    """What makes the file another than is read here."""
    found = []
    version, mode = named[MARK], named.get("logprobs_mode")
    if not isinstance(version, np.ndarray) or version.ndim or version.dtype.kind not in "iu" or version > VERSION:
        found.append(Problem(WHOLE_ROW, MARK, f"{shown(version)} is no version up to {VERSION}"))
    if mode is not None and str(mode) != "processed_logprobs":
        found.append(Problem(WHOLE_ROW, "logprobs_mode", f"{shown(str(mode))} are not those over the supports"))
    return found


def _whole(named: Mapping[str, Any], name: str, num_axes: int, problems: list[Problem]) -> np.ndarray | None:
    array = named.get(name)
    if isinstance(array, np.ndarray) and array.ndim == num_axes and array.dtype.kind in "iu":
        return array.astype(np.int64)
    problems.append(Problem(WHOLE_ROW, name, f"{shown(array)} stands where integers of {num_axes} axes should"))
    return None


def _begins(
    counts: np.ndarray | None, ids: np.ndarray | None, shape: tuple[int, ...], problems: list[Problem]
) -> Int[np.ndarray, "B T_plus_1"] | None:
    """Where each token's ids begin, and in the last column where its row ends; None where the counts cut nothing."""
    if counts is None or ids is None:
        return None
    is_good = counts.shape == shape and not ((counts < 0) | (counts > len(ids))).any() and counts.sum() == len(ids)
    if not is_good:
        text = f"counts of shape {counts.shape} do not cut {len(ids)} ids into one support for each of {shape} tokens"
        problems.append(Problem(WHOLE_ROW, "support_counts", text))
        return None
    ends = np.cumsum(counts).reshape(counts.shape)
    return np.concatenate([ends[:, :1] - counts[:, :1], ends], axis=1)


def _cells(
    named: Mapping[str, Any], name: str, row: int, length: int, shape: tuple[int, ...], problems: list[Problem]
) -> Any:
    """A row of an array with an entry for each token; None where there is none."""
    array = named.get(name)
    if array is None:
        return None
    if not isinstance(array, np.ndarray) or array.shape[:2] != shape:
        if row == 0:
            problems.append(Problem(WHOLE_ROW, name, f"{shown(array)} stands where {shape} entries should"))
        return None
    return array[row, :length]


def _setting(named: Mapping[str, Any], row: int) -> Setting:
    top_k, vocab_size = _number(named, "top_k", row), _number(named, "vocab_size", row)
    top_k = None if top_k is None or not top_k.is_integer() else top_k
    is_off = top_k is not None and vocab_size is not None and top_k >= vocab_size
    return Setting(
        temperature=_number(named, "temperature", row),
        top_k=0 if is_off else None if top_k is None else int(top_k),
        top_p=_number(named, "top_p", row),
        min_p=_number(named, "min_p", row),
        stop_token_ids=tuple(_ids(named, "stop_token_ids", row)),
        allowed_token_ids=_allowed(_ids(named, "allowed_token_ids", row), vocab_size),
    )


def _number(named: Mapping[str, Any], name: str, row: int) -> float | None:
    array = named.get(f"{SAMPLING}{name}")
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iuf" or array.ndim > 1:
        return None
    if array.ndim == 1 and row >= len(array):
        return None
    # The shortest decimal: what was asked for as 0.8 is 0.8, and not the float32 next to it.
    return float(str(array[row] if array.ndim else array[()]))


def _vocab_size(named: Mapping[str, Any]) -> int | None:
    array = named.get(f"{SAMPLING}vocab_size")
    if not isinstance(array, np.ndarray) or array.ndim or array.dtype.kind not in "iu" or array < 1:
        return None
    return int(array)


def _ids(named: Mapping[str, Any], name: str, row: int) -> list[int]:
    array = named.get(f"{SAMPLING}{name}")
    if not isinstance(array, np.ndarray) or array.ndim != 2 or array.dtype.kind not in "iu" or row >= len(array):
        return []
    return [token_id for token_id in array[row].tolist() if token_id >= 0]


def _allowed(ids: list[int], vocab_size: float | None) -> tuple[int, ...] | None:
    """Without padding, which is at or past V; a row of nothing else is not restricted."""
    return tuple(one for one in ids if vocab_size is not None and one < vocab_size) or None


def _prompt(named: Mapping[str, Any], row: int) -> Any:
    """The ids of a row's prompt, without padding; None where they are not to be had."""
    ids, lengths, group = named.get("prompt_ids"), named.get("prompt_lengths"), _group(named, row)
    if not isinstance(lengths, np.ndarray) or lengths.ndim != 1 or lengths.dtype.kind not in "iu" or group is None:
        return None
    if not isinstance(ids, np.ndarray) or ids.ndim != 2 or group >= min(len(ids), len(lengths)):
        return None
    return ids[group, : max(int(lengths[group]), 0)]


def _group(named: Mapping[str, Any], row: int) -> int | None:
    size = named.get("group_size")
    if isinstance(size, np.ndarray) and size.ndim == 0 and size.dtype.kind in "iu" and size > 0:
        return row // int(size)
    return None
