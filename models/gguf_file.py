"""Checked access to the metadata and the tensors of a GGUF file."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
ROWS_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class GGUFTensor:
    """One tensor of an open file, expanded to float32 where it is read.

    Attributes:
      path: the file, for messages.
      name: in the file.
      kind: how its values are stored.
      data: one row of values or of quantised blocks for each row of the tensor, on disk.
      rows: which stored row each row is; None: they are in order.
      offset: subtracted from every value.
    """

    path: Path
    name: str
    kind: gguf.GGMLQuantizationType
    data: np.ndarray
    rows: np.ndarray | None = None
    offset: float = 0.0

    def __getitem__(self, index: tuple[slice, ...], /) -> np.ndarray:
        """One piece; the rows that it crosses are expanded, and no others.

        Raises:
          ValueError: this kind of quantisation is not known.
        """
        if self.data.ndim == 1:
            return self._expanded(self.data)[index]
        stored = self.data[index[0]] if self.rows is None else self.data[self.rows[index[0]]]
        # gguf holds its results twice before it returns them: of a few rows at a time, that is little.
        values = np.empty((len(stored), self._expanded(stored[:1])[:, *index[1:]].shape[1]), np.float32)
        for first in range(0, len(stored), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            values[rows] = self._expanded(stored[rows])[:, *index[1:]]
        return values

    def _expanded(self, stored: np.ndarray) -> np.ndarray:
        try:
            values = gguf.dequantize(stored, self.kind)
        except NotImplementedError:
            kind = self.kind.name
            raise ValueError(f"{self.path}: tensor {self.name!r} has type {kind}, which gguf cannot expand") from None
        return values - np.float32(self.offset) if self.offset else values

    def unpermuted(self, num_heads: int) -> "GGUFTensor":
        """The rows in the order `unpermute` gives them."""
        order = np.arange(len(self.data))[:, None]
        return replace(self, rows=unpermute(order, num_heads)[:, 0])

    def less(self, offset: float) -> "GGUFTensor":
        """The tensor minus a number (Gemma's norms are stored as 1 + weight)."""
        return replace(self, offset=offset)


class GGUFFile:
    """An open GGUF file.

    Attributes:
      path: of the file.
      architecture: one of `ARCHITECTURES`; the metadata of the decoder begin with it.
    """

    def __init__(self, path: Path):
        """Parse the header; tensors stay on disk until they are read.

        Raises:
          ValueError: the file is damaged or of an unsupported architecture.
        """
        self.path = path
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
            if unknown := re.search(r"(\d+)\)? is not a valid GGMLQuantizationType", str(error)):
                raise ValueError(f"{path} holds a tensor of type {unknown[1]}, which gguf does not know") from None
            raise ValueError(f"{path} is not a whole GGUF file: {error}") from None
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = self.require("general.architecture", ARCHITECTURES)

    def metadata(self, name: str, default: Any = None) -> Any:
        """The value of a metadata field; a missing field without a default is a ValueError."""
        if name in self._fields:
            return self._fields[name].contents()
        if default is None:
            raise ValueError(f"{self.path}: metadata field {name!r} is missing")
        return default

    def require(self, name: str, allowed: tuple, default: Any = None) -> Any:
        """As `metadata`, for a field whose value must be one of those allowed."""
        value = self.metadata(name, default)
        if value not in allowed:
            raise ValueError(f"{self.path}: {name}={value!r} is not supported, allowed: {allowed}")
        return value

    def number(self, name: str, default: float | int | None = None) -> float | int:
        """As `metadata`, for a field of the decoder that must hold one number; its name goes on from the architecture.

        In: "block_count"  Read: "llama.block_count"
        """
        name = f"{self.architecture}.{name}"
        value = self.metadata(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{self.path}: {name}={value!r} is not supported, allowed: one number")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """As `number`, for a whole number."""
        value = self.number(name, default)
        if not isinstance(value, int):
            raise ValueError(f"{self.path}: {self.architecture}.{name}={value!r} is not supported, allowed: an integer")
        return value

    def has_tensor(self, name: str) -> bool:
        """Whether the file holds a tensor of that name."""
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, one row per output; a missing one is a ValueError."""
        if name not in self._tensors:
            raise ValueError(f"{self.path}: tensor {name!r} is missing")
        # GGUF lists the fastest axis first.
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def tensor(self, name: str, shape: tuple[int, ...]) -> GGUFTensor:
        """A tensor of the file; a missing or misshapen one is a ValueError."""
        if name not in self._tensors:
            raise ValueError(f"{self.path}: tensor {name!r} with shape {shape} is missing")
        found = self.shape(name)
        if found != shape:
            raise ValueError(f"{self.path}: tensor {name!r} must have shape {shape}, it has {found}")
        tensor = self._tensors[name]
        return GGUFTensor(self.path, name, tensor.tensor_type, tensor.data)

    def refuse_unused(self, used: set[str]) -> None:
        """Raise a ValueError if a tensor belongs to no parameter (experts, biases)."""
        unused = sorted(set(self._tensors) - used)
        if unused:
            raise ValueError(f"{self.path}: {len(unused)} tensors belong to no parameter, the first is {unused[0]!r}")


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Query or key rows of each head from llama.cpp's interleaved rotary pairs to the halves `layers.rotate` turns.

    In: rows [a0, b0, a1, b1] of one head  Out: [a0, a1, b0, b1]
    """
    num_rows, width = weight.shape
    pairs = weight.reshape(num_heads, num_rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(num_rows, width)
