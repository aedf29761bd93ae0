"""What a process holds, read from Linux's /proc, and the processor time it took."""

import ctypes
import gc
import time
from pathlib import Path


class Measured:
    """A side of a benchmark that says what its process holds, in MiB; `libraries` is what imports alone take."""

    def __init__(self) -> None:
        self.libraries = _status("VmRSS")

    def forget_peak(self) -> None:
        """The next peak is the largest from now on: without loading and compiling, and what they left unused."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")

    def processor_seconds(self) -> float:
        """Of all its threads, since it began."""
        return time.process_time()

    def memory(self) -> dict[str, float]:
        return {"libraries": self.libraries, "peak": _status("VmHWM")}


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status has no {field}")
