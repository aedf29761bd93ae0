"""vLLM's offline API on the sampler of jaxmask: `LLM`, its settings and its outputs, and `python -m serve`.

Names are looked up on first use: JAX takes longer to import than a command line takes to print its help.
"""

import importlib
from typing import Any

_HOMES = {
    "LLM": "serve.llm",
    "SamplingParams": "jaxmask",
    "CompletionOutput": "serve.outputs",
    "Logprob": "serve.outputs",
    "RequestOutput": "serve.outputs",
    "SamplingMask": "serve.outputs",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """The public name `name`, from the module it lives in; raises AttributeError where there is none."""
    if name not in _HOMES:
        raise AttributeError(f"module 'serve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(_HOMES)
