"""What endpoints share: the engine, the tokenizer, the model's name, and what the server was told."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Mapping
from typing import Any

from serve.api.errors import ApiError
from serve.async_engine import AsyncEngine


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """What a server can be told about its HTTP side.

    Attributes:
      model_names: by which requests may call the model; the first is the one in responses.
      api_keys: one of which each request must bring; none: anybody may ask.
      enable_rl_endpoints: whether weights can be replaced and the server paused, over HTTP.
      request_timeout: seconds after which a request ends with what it has; None: no limit.
      drain_timeout: seconds for requests to end in, once the server is told to stop.
      max_body_bytes: largest body of a request.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    enable_rl_endpoints: bool = False
    request_timeout: float | None = None
    drain_timeout: float = 30.0
    max_body_bytes: int = 32 * 2**20

    def __post_init__(self) -> None:
        """Checks the fields; raises ValueError."""
        if not self.model_names or not all(self.model_names):
            raise ValueError(f"model_names must hold names that are not empty, got {self.model_names!r}.")
        if not all(self.api_keys):
            raise ValueError("api_keys must not be empty.")
        for field in ("request_timeout", "drain_timeout"):
            value = getattr(self, field)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{field} must be in (0, inf) seconds, got {value}.")
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes must be at least 1, got {self.max_body_bytes}.")


@dataclasses.dataclass(frozen=True)
class Service:
    """What endpoints answer with.

    Attributes:
      engine: takes requests.
      config: the server's.
      defaults: settings that the model recommends, by their names in `SamplingParams`, for OpenAI's endpoints.
      started_at: seconds since 1970.
    """

    engine: AsyncEngine
    config: ServerConfig
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    started_at: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        """The model's name in responses."""
        return self.config.model_names[0]

    @property
    def tokenizer(self) -> Any:
        """The model's; None where it has none."""
        return self.engine.engine.limits.tokenizer

    def now(self) -> int:
        """Seconds since 1970."""
        return int(time.time())


def new_id() -> str:
    """A new name for a request: 32 hexadecimal digits. No secret: they do not come from the system's entropy.

    Reading that would let the engine's thread run, and every request wait for its next turn.
    """
    return f"{random.getrandbits(128):032x}"


def check_model(service: Service, name: str | None) -> None:
    """Raises ApiError 404 where a request names another model; a request may name none."""
    if name is not None and name not in service.config.model_names:
        raise ApiError(404, f"The model `{name}` does not exist.", "model")
