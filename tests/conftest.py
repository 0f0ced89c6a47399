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

# Tests start hundreds of processes. Without bytecode on disk, each process would compile the package again,
# and each worker would rewrite the assertions of every test module in every run.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if "XDG_CACHE_HOME" not in os.environ:  # all processes of a run share its converted files
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="penstock-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# Read when torch is first imported, here and in processes that tests start. Several test processes share the
# cores, and threads that spin while they wait would slow all of them down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if find_spec("triton") is not None and not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined; tests/kernels needs it

TESTS = Path(__file__).parent
LONGEST_FIRST = ("e2e", "docs", "kernels", "parity", "generation", "bench", "cli", "engine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest folders first: a long file at the end would leave the other workers without work."""

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(TESTS).parts[0] if TESTS in item.path.parents else ""
        return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one worker, and all of e2e to the same worker, because its tests share servers.

    Groups of xdist do not work: xdist 3.8 writes them into `Item._nodeid`, which pytest 9.2 does not read.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return "tests/e2e" if file.startswith("tests/e2e/") else file

    config.option.loadscopereorder = False
    return ByFile(config, log)
