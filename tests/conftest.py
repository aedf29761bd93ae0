"""Strict settings for every test: no silent promotion, no silent broadcasting, several CPU devices."""

import importlib.metadata
import os
import shutil
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
if os.environ.get("JAXMASK_TESTS_UNOPTIMIZED") == "1":
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    # XLA had two ways to make code of a fusion, and ends at a flag it does not know; the one left is the slow one.
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

import jax
import jaxtyping
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# `make test` runs some tests without XLA's optimizers ("1"), and then the others ("0"); else all run with them.
OPTIMIZERS_OFF = os.environ.get("JAXMASK_TESTS_UNOPTIMIZED", "")

# Files that take longest, which therefore begin first: what is left for the end is short, and no process waits long.
LONGEST = (
    "test_notebooks.py",
    "test_kill.py",
    "test_processes.py",
    "test_mesh_runs.py",
    "test_sharding.py",
    "test_sampling.py",
    "test_server_process.py",
    "test_bisection.py",
    "test_gpu_compile.py",
    "test_engine.py",
    "test_filter_kernel.py",
)


def _is_unoptimized(item):
    return item.get_closest_marker("unoptimized") is not None and item.get_closest_marker("optimized") is None


def pytest_collection_modifyitems(config, items):
    """The tests of the longest files first; those of a file stay together. Files that hold both kinds run in halves."""
    marked = {item: _is_unoptimized(item) for item in items}
    halves = {item.path for item, is_marked in marked.items() if is_marked}
    if OPTIMIZERS_OFF and halves:
        wanted = OPTIMIZERS_OFF == "1"
        left = [item for item in items if item.path in halves and marked[item] != wanted]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))


@pytest.fixture
def unchecked():
    """No type checks: jax fills records with descriptions of arrays, and bad values must reach our own checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def chromium():
    """A browser without a window."""
    sync_api = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


# The memory maps that this process may have when a file of tests begins, and within one, whose fixtures have compiled
# what its tests count on. The compiler aborts where Linux has no more (65,530).
MAPS_AT_FIRST, MAPS_AT_MOST = 25_000, 55_000
# Seconds between two looks at the memory maps, which are thousands of lines: no test of less compiles many programs.
BETWEEN_LOOKS = 2.0
last_look = time.monotonic()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Keeps few compiled programs: each takes some hundred memory maps."""
    global last_look
    result = yield
    is_last = nextitem is None or nextitem.path != item.path
    maps = Path("/proc/self/maps")
    if maps.exists() and (is_last or time.monotonic() - last_look > BETWEEN_LOOKS):
        if maps.read_bytes().count(b"\n") > (MAPS_AT_FIRST if is_last else MAPS_AT_MOST):
            jax.clear_caches()
        last_look = time.monotonic()
    return result
