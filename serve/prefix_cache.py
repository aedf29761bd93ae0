"""What was read of prompts, kept for others that begin alike; the least recently used goes first.

Prompts lie in a tree whose edges are blocks of ids, so that a look-up costs as much as the prompt is long, however many
are kept. Ids are compared, not hashes of them. Knows nothing of programs: a row is whatever the engine stores.

    In: kept [a b c d], [a b x y]; asked for [a b c z]  Out: the first, of which 3 tokens are of use
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

# Ids of a block, and the shortest beginning that is worth keeping.
BLOCK = 16

TokenTuple = tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """What was read of a prompt.

    Attributes:
      salt: of the requests that may use it.
      token_ids: what was read.
      row: a cache of one row that holds it.
      width: tokens that the row has room for.
      can_be_cut: whether any beginning of the tokens is of use without the rest.
    """

    salt: str | None
    token_ids: TokenTuple
    row: Any
    width: int
    can_be_cut: bool

    def num_shared(self, token_ids: TokenTuple) -> int:
        """Tokens of use to a prompt that begins with these."""
        own = self.token_ids
        if token_ids[: len(own)] == own:
            return len(own)
        if not self.can_be_cut:
            return 0
        pairs = enumerate(zip(own, token_ids, strict=False))
        return next((place for place, (one, other) in pairs if one != other), min(len(own), len(token_ids)))


class _Node:
    """Entries that begin alike, and those of them that go on alike for one more block."""

    def __init__(self) -> None:
        self.entries: dict[Entry, None] = {}
        self.children: dict[TokenTuple, _Node] = {}


class PrefixCache:
    """Entries, up to a total width."""

    def __init__(self, max_tokens: int):
        """Nothing yet.

        Args:
          max_tokens: tokens that all rows together may have room for.
        """
        self._max_tokens = max_tokens
        self.clear()

    def clear(self) -> None:
        """Drops all entries."""
        self.num_tokens = 0
        self._entries: collections.OrderedDict[tuple[str | None, TokenTuple], Entry] = collections.OrderedDict()
        self._roots: dict[str | None, _Node] = {}

    def __len__(self) -> int:
        """Entries."""
        return len(self._entries)

    def find(self, salt: str | None, token_ids: TokenTuple, most_width: int) -> tuple[Entry, int] | None:
        """The entry that holds most of the first of these tokens, and how many; None where that is less than a block.

        Args:
          salt: of the request.
          token_ids: what is to be read.
          most_width: rows with more room are of no use.
        """
        for node in reversed(list(self._path(salt, token_ids))):
            usable = [(one.num_shared(token_ids), one) for one in node.entries if one.width <= most_width]
            num_shared, entry = max(usable, key=lambda pair: pair[0], default=(0, None))
            if entry is not None and num_shared >= BLOCK:
                self._entries.move_to_end((salt, entry.token_ids))
                return entry, num_shared
        return None

    def takes(self, num_tokens: int, width: int) -> bool:
        """Whether so much would be kept."""
        return num_tokens >= BLOCK and width <= self._max_tokens

    def store(self, entry: Entry) -> None:
        """Keeps an entry, and lets others go: those that it has all of, then those that were not used for longest."""
        if not self.takes(len(entry.token_ids), entry.width):
            return
        found = self.find(entry.salt, entry.token_ids, entry.width)
        if found is not None and found[1] == len(entry.token_ids):
            return
        same = self._entries.get((entry.salt, entry.token_ids))
        if same is not None:
            # In a wider row, which may be of no use any more.
            self._drop(same)
        if entry.can_be_cut:
            self._drop_beginnings(entry)
        self._entries[entry.salt, entry.token_ids] = entry
        for node in self._path(entry.salt, entry.token_ids, grows=True):
            node.entries[entry] = None
        self.num_tokens += entry.width
        while self.num_tokens > self._max_tokens:
            self._drop(next(iter(self._entries.values())))

    def _drop_beginnings(self, entry: Entry) -> None:
        token_ids = entry.token_ids
        for depth, node in enumerate(list(self._path(entry.salt, token_ids)), start=1):
            for other in list(node.entries):
                if len(other.token_ids) // BLOCK == depth and token_ids[: len(other.token_ids)] == other.token_ids:
                    self._drop(other)

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.salt, entry.token_ids]
        self.num_tokens -= entry.width
        path = list(self._path(entry.salt, entry.token_ids))
        for node in path:
            del node.entries[entry]
        parents = [self._roots[entry.salt], *path]
        for (parent, node), block in zip(itertools.pairwise(parents), _blocks(entry.token_ids), strict=True):
            if not node.entries:
                # What hangs on it is empty too.
                del parent.children[block]
                break
        if not self._roots[entry.salt].children:
            del self._roots[entry.salt]

    def _path(self, salt: str | None, token_ids: TokenTuple, grows: bool = False) -> Iterator[_Node]:
        """Nodes along the whole blocks of these tokens, as far as there are any; or new ones."""
        node: _Node | None = self._roots.setdefault(salt, _Node()) if grows else self._roots.get(salt)
        for block in _blocks(token_ids):
            if node is None:
                return
            node = node.children.setdefault(block, _Node()) if grows else node.children.get(block)
            if node is not None:
                yield node


def _blocks(token_ids: TokenTuple) -> Iterator[TokenTuple]:
    return (token_ids[begin : begin + BLOCK] for begin in range(0, len(token_ids) - BLOCK + 1, BLOCK))
