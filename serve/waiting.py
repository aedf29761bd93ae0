"""Completions that wait for a slot, and who is next.

Slots go to the request that has the fewest, and of several to the one that came first: one that asks for many
completions does not keep others out. Up to a quarter of all slots count as none, so that a group of completions gets
its slots together, as far as they go: its prompt is then read once.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Sequence

from serve.completions import Completion


@dataclasses.dataclass(eq=False)
class _Group:
    """What waits of a request, and how many of its completions have a slot."""

    arrival: int
    waiting: collections.deque[Completion]
    num_running: int = 0


class Waiting:
    """A queue of completions, in which no call costs more than a few steps for each completion that it concerns."""

    def __init__(self, max_num_seqs: int):
        """An empty queue for so many slots."""
        self._share = max(1, max_num_seqs // 4)
        self._arrivals = itertools.count()
        self.clear()

    def clear(self) -> None:
        """Drops all that wait."""
        self._num_waiting = 0
        self._groups: dict[str, _Group] = {}
        # How often a group has had its share, and when it came. An entry counts while it says what its group says.
        self._turns: list[tuple[int, int, str]] = []
        # How many wait of each number of tokens.
        self._lengths: collections.Counter[int] = collections.Counter()

    def __len__(self) -> int:
        """Completions that wait."""
        return self._num_waiting

    @property
    def most_tokens(self) -> int:
        """Most tokens of one that waits, prompt included; 0 where none does."""
        return max(self._lengths, default=0)

    def add(self, completions: Sequence[Completion]) -> None:
        """All completions of a new request, at least one."""
        request = completions[0].request
        self._groups[request.request_id] = _Group(next(self._arrivals), collections.deque(completions))
        self._num_waiting += len(completions)
        self._lengths[request.num_tokens] += len(completions)
        self._queue(request.request_id)

    def take(self, count: int) -> list[Completion]:
        """Those that are next, up to so many; from now on they have a slot."""
        taken: list[Completion] = []
        while len(taken) < count and self._turns:
            turn, arrival, request_id = heapq.heappop(self._turns)
            group = self._groups.get(request_id)
            if group is None or (turn, arrival) != (self._turn(group), group.arrival):
                continue
            while len(taken) < count and group.waiting and self._turn(group) == turn:
                taken.append(group.waiting.popleft())
                group.num_running += 1
                self._forget(taken[-1], 1)
            self._queue(request_id)
        return taken

    def ended(self, completion: Completion) -> None:
        """One that was taken has given back its slot."""
        group = self._groups.get(completion.request.request_id)
        if group is not None:
            before = self._turn(group)
            group.num_running -= 1
            if self._turn(group) != before:
                self._queue(completion.request.request_id)

    def drop(self, request_id: str) -> None:
        """What waits of a request waits no more."""
        group = self._groups.pop(request_id, None)
        if group is not None:
            self._forget(group.waiting[0], len(group.waiting))
            self._tidy()

    def _turn(self, group: _Group) -> int:
        return group.num_running // self._share

    def _queue(self, request_id: str) -> None:
        """Into the order; a group of which none waits is of no interest any more."""
        group = self._groups[request_id]
        if group.waiting:
            heapq.heappush(self._turns, (self._turn(group), group.arrival, request_id))
        else:
            del self._groups[request_id]
        self._tidy()

    def _forget(self, completion: Completion, count: int) -> None:
        num_tokens = completion.request.num_tokens
        self._num_waiting -= count
        self._lengths[num_tokens] -= count
        if not self._lengths[num_tokens]:
            del self._lengths[num_tokens]

    def _tidy(self) -> None:
        """Entries that count no more go before they are the most."""
        if len(self._turns) > 2 * len(self._groups) + 64:
            self._turns = [(self._turn(group), group.arrival, name) for name, group in self._groups.items()]
            heapq.heapify(self._turns)
