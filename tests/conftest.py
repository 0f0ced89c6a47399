"""Settings that every test shares: no network, no idle spinning, bytecode on disk, and the order of files."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is first imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

# Tests start some hundred processes. Without bytecode on disk each would compile the package again, and each
# worker would rewrite the assertions of every test module in every run.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest: a long file that comes last would leave the other workers without work."""

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(TESTS).parts[0] if TESTS in item.path.parents else ""
        return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one worker, and all of e2e to the same one: its tests share the servers they start.

    Groups of xdist do not do it: xdist 3.8 writes them into `Item._nodeid`, which pytest 9.2 does not read.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return "tests/e2e" if file.startswith("tests/e2e/") else file

    config.option.loadscopereorder = False
    return ByFile(config, log)
