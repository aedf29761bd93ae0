"""A server process on a free port, and a tiny model for it to serve."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from flax import nnx

import models

ROOT = Path(__file__).parents[1]
READY = re.compile(r"serving .* on (http://\S+)")
MASKED = ("--return-sampling-mask", "--logprobs-mode", "processed_logprobs")


def tiny_model(folder: Path, vocab_size: int = 96) -> models.Decoder:
    """A random decoder of two layers, saved in the hub's layout; it has no tokenizer."""
    config = models.DecoderConfig(
        vocab_size=vocab_size,
        width=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_width=64,
        max_length=128,
        rope_theta=10_000.0,
        rope_scaling=None,
        norm_eps=1e-6,
        tie_embeddings=True,
    )
    decoder = models.Decoder(config, rngs=nnx.Rngs(0))
    models.save(decoder, folder)
    return decoder


class ServerProcess:
    """`python -m serve`, once it listens.

    Attributes:
      url: where.
      lines: what it has written so far, standard output and error together.
    """

    def __init__(self, process: subprocess.Popen[str]):
        """Waits until it says where it serves; raises RuntimeError where it ends before."""
        self.process, self.lines = process, list[str]()
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line)
            if found := READY.search(line):
                self.url = found.group(1)
                break
        else:
            raise RuntimeError(f"the server ended with {process.wait()}:\n{''.join(self.lines)}")
        # Its pipe must not fill up.
        self._reader = threading.Thread(target=lambda: self.lines.extend(process.stdout or ()), daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """All it has written."""
        return "".join(self.lines)

    def rss(self) -> int:
        """Bytes of memory it has resident."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGESIZE")

    def terminate(self, seconds: float = 60) -> int:
        """Sends SIGTERM and waits; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.ended(seconds)

    def ended(self, seconds: float = 60) -> int:
        """Waits until it has ended and all it wrote is here; returns the exit code."""
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code


@contextlib.contextmanager
def server_process(model: str | Path, *options: str) -> Iterator[ServerProcess]:
    """A running server of a model; killed at the end where it still runs."""
    command = [sys.executable, "-m", "serve", str(model), "--port", "0", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, text=True, cwd=folder, env=environment, **pipes) as process,
    ):
        try:
            yield ServerProcess(process)
        finally:
            process.kill()
