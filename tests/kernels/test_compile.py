"""Kernels are compiled for a GPU, because the compiler rejects some code that the interpreter runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.kernels.experts import FP8_TILINGS, HALF_TILINGS
from penstock.kernels.limits import H200, SHARED_BYTES, limits_for, num_stages
from tests.thinning import ALL_CASES

MAX_KEPT_BYTES = 512 << 20


@pytest.fixture
def compiled_before(pytestconfig: pytest.Config, tmp_path: Path) -> Path:
    """The folder of kernels that earlier runs have compiled, with the assembler's logs.

    Triton's cache key covers the code of a kernel and its helpers, the target, the constants and Triton's
    version.
    """
    cache = getattr(pytestconfig, "cache", None)
    if cache is None or ALL_CASES:
        return tmp_path
    folder: Path = cache.mkdir("kernels")
    if sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) > MAX_KEPT_BYTES:
        shutil.rmtree(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_every_kernel_compiles_for_every_kind_of_gpu_and_fits_it(
    tmp_path: Path, compiled_before: Path
) -> None:
    """With PENSTOCK_ALL_CASES=1, compile each shape for each target; otherwise each kernel for one target."""
    command = [sys.executable, "-m", "tests.kernels.compile_kernels", *(["--all"] if ALL_CASES else [])]
    environment = {"TRITON_CACHE_DIR": str(compiled_before), "HOME": str(tmp_path)}
    environment["PYTHONPATH"] = ":".join(sys.path)
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3900)
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize(("wanted", "tile_bytes"), [(6, 20480), (4, 36864), (3, 49152), (2, 150 << 10)])
def test_pipeline_stages_fit_the_shared_memory(
    capability: tuple[int, int], wanted: int, tile_bytes: int
) -> None:
    limits = limits_for(capability)
    stages = num_stages(wanted, tile_bytes, limits, other_bytes=4096)
    buffers = stages if limits.has_async_products else max(stages - 1, 1)
    assert 1 <= stages <= wanted
    assert stages == 1 or buffers * tile_bytes + 4096 <= limits.shared_bytes


def test_an_h200_uses_the_stages_of_the_tables() -> None:
    for tilings, weight_bytes in ((HALF_TILINGS, 2), (FP8_TILINGS, 1)):
        for _, tiling in tilings:
            for tile, halves in ((tiling.up, 2), (tiling.down, 1)):
                row_bytes = weight_bytes if tiling.early else 2
                tile_bytes = tile.depth * (tiling.rows * row_bytes + halves * tile.cols * weight_bytes)
                assert num_stages(tile.stages, tile_bytes, H200, tiling.rows * tile.depth) == tile.stages
