"""Settings of the kernel tests. Kernels run on a CUDA device or in Triton's interpreter; without Triton they
are not tested."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.thinning import ALL_CASES

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
elif os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels import fast_interpreter, interpreter_repairs

    interpreter_repairs.install()
    fast_interpreter.install()


def pytest_itemcollected(item: pytest.Item) -> None:
    if torch.cuda.is_available() and Path(__file__).parent in item.path.parents:
        item.add_marker("gpu")


# Tests with many cases. The interpreter runs every third case; a device, or PENSTOCK_ALL_CASES=1, runs all.
THINNED = {
    "test_decode.py::test_a_graph_gives_the_tokens_of_steps_without_one",
    "test_experts.py::test_the_tiling_for_a_number_of_tokens_gives_what_torch_gives",
    "test_graphs.py::test_a_padded_step_gives_what_an_unpadded_one_gives",
    "test_sampling.py::test_a_row_with_non_finite_logits_is_reported_and_changes_no_other_row",
    "test_attention.py::test_keys_of_earlier_steps_are_read_from_the_kv_cache",
    "test_attention.py::test_long_rows_equal_the_reference",
    "test_paged.py::test_the_kernel_equals_the_reference",
    "test_sampling.py::test_thresholds_keep_what_sorting_keeps",
    "test_sampling.py::test_a_batch_with_every_option_gives_the_tokens_of_torch",
    "test_experts.py::test_every_tiling_gives_what_torch_gives",
    "test_graphs.py::test_chunked_rows_in_padded_steps_give_what_whole_rows_give",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() or ALL_CASES:
        return
    seen: Counter[str] = Counter()
    left_out = []
    for item in items:
        name = f"{item.path.name}::{getattr(item, 'originalname', item.name)}"
        if name in THINNED and Path(__file__).parent in item.path.parents:
            if seen[name] % 3:
                left_out.append(item)
            seen[name] += 1
    if left_out:
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Draw the same random tensors in every run, on the CPU and on the device."""
    torch.manual_seed(0)


@pytest.fixture
def kernels() -> Iterator[None]:
    """Run the kernels on the CPU too, through the interpreter."""
    from penstock.kernels import language

    before = language._devices
    language.set_kernel_devices("cpu", "cuda")
    yield
    language.set_kernel_devices(*before)


@pytest.fixture
def only_interpreted() -> None:
    from penstock.kernels import language

    if not language.IS_INTERPRETED:
        pytest.skip("on a CUDA device tests/gpu compares whole models")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
