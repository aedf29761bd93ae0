"""What a generation benchmark asks of each side, as plain values, so that a rival in another process gets the same.

A rival is a class `Rival(folder, max_length, **options)` with the methods `run(case)`, which returns token ids and
log-probabilities as lists of lists, and `token_logprobs(token_ids)`, the log-probability of every token but the first
under teacher forcing. `folder` holds float32 weights in the hub's layout; `max_length` is the longest row.
"""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """Prompts of one length and how to go on from them; no row ends before `max_new_tokens`."""

    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 0.95

    @property
    def num_rows(self) -> int:
        return len(self.prompts)

    @property
    def prompt_length(self) -> int:
        return len(self.prompts[0])

    @property
    def num_tokens(self) -> int:
        """Tokens that one run generates."""
        return self.num_rows * self.max_new_tokens

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "Case":
        return cls(**values | {"prompts": tuple(map(tuple, values["prompts"]))})
