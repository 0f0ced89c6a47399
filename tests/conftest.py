"""Settings that every test shares: no network, no idle spinning, and the order in which files run."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is first imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

if "XDG_CACHE_HOME" not in os.environ:  # converted files of one run, for all of its processes
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="penstock-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# Read when torch is first imported, here and in processes that tests start. Several test processes share the
# cores: threads that spin while they wait for each other slow all of them down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if find_spec("triton") is not None and not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined; tests/kernels needs it

TESTS = Path(__file__).parent
LONGEST_FIRST = ("e2e", "docs", "kernels", "parity", "generation", "bench", "cli", "engine")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Keep the groups below together under `pytest -n 2` too: otherwise each worker makes their fixtures."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "loadgroup"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each file to one worker, all of e2e to the same one, and begin with the longest.

    One worker for e2e means that its tests share the servers they start. A long file that comes last would
    leave the other workers without work.
    """

    def folder(item: pytest.Item) -> str:
        return item.path.relative_to(TESTS).parts[0] if TESTS in item.path.parents else ""

    def place(item: pytest.Item) -> int:
        return LONGEST_FIRST.index(folder(item)) if folder(item) in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=place)
    for item in items if config.pluginmanager.has_plugin("xdist") else ():
        item.add_marker(pytest.mark.xdist_group("e2e" if folder(item) == "e2e" else str(item.path)))
