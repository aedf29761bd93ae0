"""Whether requests may come in, and why not. On the event loop."""

from __future__ import annotations

import asyncio
from typing import Literal

from serve.tickets import ConflictError

State = Literal["open", "keep", "closed", "updating", "asleep", "draining"]
_REASONS: dict[State, str] = {
    "closed": "The server is paused; it takes requests again after /resume.",
    "updating": "The server is getting new weights.",
    "asleep": "The server is asleep; it takes requests again after /wake_up.",
    "draining": "The server is shutting down.",
}


class Gate:
    """A gate that stands open at first.

    Attributes:
      state: "open"; "keep": paused, new requests are taken and wait; "closed", "updating", "asleep": paused, new ones
        are refused; "draining": refused for good.
    """

    def __init__(self) -> None:
        """An open gate."""
        self.state: State = "open"
        self._changed = asyncio.Event()

    @property
    def refusal(self) -> str | None:
        """Why requests are refused; None where they are taken."""
        return _REASONS.get(self.state)

    def turn(self, state: State) -> None:
        """Changes the state; whoever waits in `wait_for` is told."""
        if state != self.state:
            self.state = state
            self._changed.set()
            self._changed = asyncio.Event()

    async def wait_for(self, event: asyncio.Event) -> None:
        """Returns once the event is set; raises ConflictError where the state changes first."""
        changed = self._changed
        waiting = [asyncio.ensure_future(one.wait()) for one in (event, changed)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()
        if changed.is_set():
            raise ConflictError(f"The server was told otherwise meanwhile: it is {self.state} now.")
