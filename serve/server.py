"""The HTTP server as a process: uvicorn, which on SIGTERM answers what was taken before it goes."""

from __future__ import annotations

import asyncio
import logging
import socket
from types import FrameType

import uvicorn

from serve.api.app import create_app
from serve.api.service import Service

LOG = logging.getLogger("serve")
# Seconds in which requests are still told that the server goes.
_LAST_WORDS = 0.5
# Seconds for clients to read in what was written for them, once all completions have ended.
_PATIENCE = 5
# Seconds for which a connection may lie idle. Pools of clients keep theirs for 5: they give up first, and never write
# on a connection that is being closed under them.
_KEEP_ALIVE = 60


class Server(uvicorn.Server):
    """Uvicorn that drains: the first signal refuses new requests (503) and waits for those that were taken."""

    def __init__(self, config: uvicorn.Config, service: Service):
        """A server of an application that `create_app` made."""
        super().__init__(config)
        self._service = service
        self._draining: asyncio.Future[None] | None = None
        self._num_signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen, and says so."""
        await super().startup(sockets)
        for bound in sockets or [] if self.started else []:
            host, port = bound.getsockname()[:2]
            name = self._service.model_name
            LOG.info("serving %s on http://%s:%d", name, f"[{host}]" if ":" in host else host, port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends what goes on with what it has, the third ends the process."""
        self._num_signals += 1
        if self._num_signals > 2 or not self.started:
            super().handle_exit(sig, frame)
            return
        # A signal comes between any two instructions; the loop's own state is changed on the loop.
        act = self._begin_to_drain if self._num_signals == 1 else self._service.engine.abort
        asyncio.get_running_loop().call_soon_threadsafe(act)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; clients that do not read, or never end what they ask for, are hung up on after a while."""
        # Cancelled by uvicorn instead, their endpoints would end in tracebacks.
        asyncio.get_running_loop().call_later(_PATIENCE, self._hang_up)
        await super().shutdown(sockets)

    def _hang_up(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def _begin_to_drain(self) -> None:
        LOG.info("stopping: %d completions go on, new requests are refused", self._service.engine.num_open)
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        await self._service.engine.drain(self._service.config.drain_timeout)
        LOG.info("all completions have ended")
        # Clients that were answered just now may ask once more on the connection they have.
        await asyncio.sleep(_LAST_WORDS)
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, so that a port in use is known before the model is loaded; port 0 takes a free one.

    Raises:
      ValueError: no such port, or no address; an empty one would be all of the machine's.
      OSError: the address cannot be had.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"port must be in [0, 65535], got {port}.")
    if not host:
        raise ValueError("host must not be empty; 0.0.0.0 is all addresses of the machine.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return bound


def run(service: Service, bound: socket.socket, *, access_log: bool = True) -> None:
    """Serves until a signal comes."""
    config = uvicorn.Config(
        create_app(service),
        # Its lines go where ours go.
        log_config=None,
        access_log=access_log,
        # Streams that outlive the drain are told so within it, and others are hung up on: this is never reached.
        timeout_graceful_shutdown=2 * _PATIENCE,
        timeout_keep_alive=_KEEP_ALIVE,
    )
    Server(config, service).run(sockets=[bound])
