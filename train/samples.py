"""Completions with their supports, for people and for files."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from jaxmask import Finish, Rollout
from train.report import end_last_line
from train.tasks import Rewards

MAX_IDS_SHOWN = 8


def describe(
    rollout: Rollout, rewards: Rewards, show: Callable[[Sequence[int]], str], num: int
) -> list[dict[str, Any]]:
    """The first completion of each of the first `num` prompts, as plain values.

    Each has its prompt, completion, reward, exact and finish_reason, and for each of its tokens: tokens (text),
    token_ids, logprobs (over the support, in nats), sampling_mask (the ids of the support) and mask_tokens (the text of
    the first MAX_IDS_SHOWN of them).

    Args:
      rollout: any.
      rewards: of its completions.
      show: token ids to text.
      num: at most this many.
    """
    described = []
    show_id = functools.cache(lambda token_id: show([token_id]))
    for prompt in range(min(num, rollout.prompt_lengths.shape[0])):
        row = prompt * rollout.group_size
        length = int(rollout.lengths[row])
        prompt_ids = rollout.prompt_ids[prompt, : rollout.prompt_lengths[prompt]].tolist()
        token_ids = rollout.token_ids[row, :length].tolist()
        supports = rollout.support[row, :length].to_lists()
        described.append(
            {
                "prompt": show(prompt_ids),
                "completion": show(token_ids),
                "reward": float(rewards.values[row]),
                "exact": bool(rewards.is_exact[row]),
                "finish_reason": Finish(int(rollout.finish[row])).name.lower(),
                "tokens": [show_id(token_id) for token_id in token_ids],
                "token_ids": token_ids,
                "logprobs": rollout.logprobs[row, :length].tolist(),
                "sampling_mask": supports,
                "mask_tokens": [[show_id(token_id) for token_id in ids[:MAX_IDS_SHOWN]] for ids in supports],
            }
        )
    return described


def write(path: Path, step: int, described: Sequence[dict[str, Any]]) -> None:
    """Appends samples as JSON lines."""
    end_last_line(path)
    with path.open("a", encoding="utf-8") as file:
        for sample in described:
            file.write(json.dumps({"step": step, **sample}) + "\n")


def table(described: Sequence[dict[str, Any]], show: Callable[[Sequence[int]], str]) -> Table:
    """Samples as a table: each token over the ids it was drawn from."""
    view = Table(title="samples: each token and, in braces, the tokens it was drawn from", title_justify="left")
    for column in ("prompt", "completion", "reward", "token {support}"):
        view.add_column(column, overflow="fold")
    for sample in described:
        supports = Text(" ").join(
            _token(token, mask, show) for token, mask in zip(sample["tokens"], sample["sampling_mask"], strict=True)
        )
        mark = "green" if sample["exact"] else "red"
        view.add_row(
            Text(_prompt_tail(sample["prompt"])),
            Text(sample["completion"].strip(), style=mark),
            f"{sample['reward']:.2f}",
            supports,
        )
    return view


def _token(token: str, support: Sequence[int], show: Callable[[Sequence[int]], str]) -> Text:
    kept = [_visible(show([token_id])) for token_id in support[:MAX_IDS_SHOWN]]
    more = f" +{len(support) - MAX_IDS_SHOWN}" if len(support) > MAX_IDS_SHOWN else ""
    style = "dim" if len(support) == 1 else "bold"
    return Text.assemble((_visible(token), style), ("{" + " ".join(kept) + more + "}", "cyan"))


def _visible(token: str) -> str:
    return token.replace("\n", "\\n").replace(" ", "\u00b7")


def _prompt_tail(prompt: str, limit: int = 100) -> str:
    return prompt if len(prompt) <= limit else "\u2026" + prompt[-limit:]
