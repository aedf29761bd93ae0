"""A server that learners steer: it gets new weights, or gives its memory away and takes it back.

Weights are read and checked before anything changes; what is refused leaves all as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal, cast

import numpy as np

from serve.async_engine import AsyncEngine, PauseMode
from serve.engine import Engine
from serve.tickets import ConflictError, UnavailableError
from serve.weight_files import Places, on_the_host

TAGS = ("weights", "kv_cache")
SleepLevel = Literal[1, 2]
_Awake = Literal["open", "keep", "closed"]


@dataclasses.dataclass
class _Sleep:
    """A server that sleeps.

    Attributes:
      before: its gate when it fell asleep.
      leaves: the weights on the host; None where there are none.
      is_placed: whether the device has the weights.
      missing: what has not been woken up.
    """

    before: _Awake
    leaves: list[np.ndarray] | None = None
    is_placed: bool = True
    missing: frozenset[str] = frozenset()


class Control:
    """Steers an engine; one call at a time, further ones raise ConflictError. On the event loop."""

    def __init__(self, engine: AsyncEngine):
        """For an engine whose model has its weights."""
        self._engine = engine
        self._places = Places(engine.engine.model)
        self._sleep: _Sleep | None = None
        self._is_busy = False

    @property
    def is_sleeping(self) -> bool:
        """Whether a part of the server sleeps."""
        return self._sleep is not None

    async def pause(self, mode: PauseMode) -> None:
        """See `AsyncEngine.pause`; a server that sleeps is paused already."""
        self._refuse_asleep()
        await self._engine.pause(mode)

    async def resume(self) -> None:
        """See `AsyncEngine.resume`."""
        self._refuse_asleep()
        await self._engine.resume()

    async def update(self, path: str, version: str | None, mode: PauseMode) -> str:
        """Replaces the weights by those of a decoder on the disk; returns the name of the new ones.

        A server that sleeps keeps them until it is woken up.

        Args:
          path: see `Places.read`.
          version: their name; None: see `Engine.update_weights`.
          mode: "abort" ends requests first, "wait" answers them first with the old weights; both refuse new requests
            meanwhile. "keep" goes on with the new weights.

        Raises:
          ConflictError: weights are being replaced or moved already, or the server was paused or resumed meanwhile.
          FileNotFoundError, ValueError: see `Places.read`.
          UnavailableError: the server shuts down, or its engine has died.
        """
        with self._alone():
            leaves = await asyncio.to_thread(self._places.read, path)
            if self._sleep is not None:
                return await self._update_asleep(self._sleep, leaves, version)
            model = await asyncio.to_thread(self._places.put, leaves)
            async with self._stopped(mode):
                return await self._replace(model, version)

    async def rename(self, version: str) -> None:
        """Gives the weights another name."""
        with self._alone():
            await self._engine.call(lambda engine: engine.update_weights(engine.model, version))

    async def sleep(self, level: SleepLevel, mode: Literal["abort", "wait"]) -> None:
        """Gives the device's memory away: weights go to the host (1), or are dropped (2).

        Requests end first, as in `AsyncEngine.pause`. A server that sleeps at level 1 can be put to level 2.

        Raises:
          ConflictError: as `update`.
        """
        with self._alone():
            if self._sleep is None:
                self._sleep = _Sleep(await self._fall_asleep(mode))
            sleep = self._sleep
            sleep.missing = frozenset(TAGS)
            if sleep.is_placed:
                sleep.leaves = await self._engine.call(lambda engine: self._empty(engine, level))
                sleep.is_placed = False
            if level == 2:
                sleep.leaves = None

    async def wake_up(self, tags: Sequence[str]) -> bool:
        """Takes back what `sleep` gave away, or of that what is named; whether all is awake now.

        The last part opens the gate again, as it was before. Dropped weights are not taken back: they come by
        `update`, before the last part is woken up.

        Raises:
          ConflictError: as `update`, or all would be awake but there are no weights.
          ValueError: an unknown tag.
        """
        unknown = sorted(set(tags) - set(TAGS))
        if unknown:
            raise ValueError(f"tags must be among {', '.join(TAGS)}, got {unknown[0]!r:.100}.")
        with self._alone():
            sleep = self._sleep
            if sleep is None:
                return True
            missing = sleep.missing - set(tags or TAGS)
            if not missing and not sleep.is_placed and sleep.leaves is None:
                raise ConflictError("The weights were dropped; POST /update_weights first, then /wake_up.")
            sleep.missing = missing
            await self._place(sleep)
            if not missing:
                self._sleep = None
                await self._engine.resume(sleep.before)
            return not missing

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if self._is_busy:
            raise ConflictError("Weights are being replaced or moved; try again once that is done.")
        if not self._engine.is_alive:
            raise UnavailableError("The engine does not run.", 1)
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    @contextlib.asynccontextmanager
    async def _stopped(self, mode: PauseMode) -> AsyncIterator[None]:
        """No request runs inside; but with "keep" all go on."""
        if mode == "keep":
            yield
            return
        before = cast(_Awake, self._engine.gate.state)
        try:
            await self._engine.pause(mode, "updating")
            if self._engine.gate.state != "updating":
                raise ConflictError("The server was paused or resumed meanwhile; its weights are as they were.")
            yield
        finally:
            if self._engine.gate.state == "updating":
                await self._engine.resume(before)

    async def _replace(self, model: Any, version: str | None) -> str:
        def replace(engine: Engine) -> str:
            engine.update_weights(model, version)
            return engine.weight_version

        return await self._engine.call(replace)

    async def _update_asleep(self, sleep: _Sleep, leaves: list[np.ndarray], version: str | None) -> str:
        name = await self._replace(self._places.without_values(), version)
        sleep.leaves, sleep.is_placed = leaves, False
        await self._place(sleep)
        return name

    async def _place(self, sleep: _Sleep) -> None:
        """Moves the weights to the device, where there are any and they are to be awake."""
        if sleep.leaves is not None and "weights" not in sleep.missing:
            model = await asyncio.to_thread(self._places.put, sleep.leaves)
            await self._replace(model, self._engine.engine.weight_version)
            sleep.leaves, sleep.is_placed = None, True

    async def _fall_asleep(self, mode: Literal["abort", "wait"]) -> _Awake:
        """Stops everything; the gate as it was before."""
        before = cast(_Awake, self._engine.gate.state)
        try:
            await self._engine.pause(mode, "asleep")
        except BaseException:
            if self._engine.gate.state == "asleep":
                await self._engine.resume(before)
            raise
        return before

    def _empty(self, engine: Engine, level: SleepLevel) -> list[np.ndarray] | None:
        """On the engine's thread: takes all off the device; the weights, unless they are dropped."""
        engine.release()
        leaves = on_the_host(engine.model) if level == 1 else None
        engine.update_weights(self._places.without_values(), engine.weight_version)
        return leaves

    def _refuse_asleep(self) -> None:
        if self._engine.gate.state == "asleep":
            raise ConflictError("The server is asleep; it goes on after /wake_up.")
