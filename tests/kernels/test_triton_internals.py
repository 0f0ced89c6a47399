"""The undocumented parts of Triton that direct launches rely on, and the public launch path without them."""

from __future__ import annotations

import ast
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import penstock
from penstock.kernels import language

triton = pytest.importorskip("triton")
internals = pytest.importorskip("penstock.kernels.triton_internals")
launch = pytest.importorskip("penstock.kernels.launch")
tl = pytest.importorskip("triton.language")


def scale(x: tl.tensor, out: tl.tensor, count: tl.tensor, factor: tl.tensor, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < count, other=0.0) * factor, mask=at < count)


class CompiledKernel:
    """Replaces a kernel that Triton has compiled, and records its launches."""

    packed_metadata = (4, 1)
    function = 55

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def launch_metadata(self, *args: Any) -> None:
        return None

    def run(self, *args: Any) -> None:
        self.launches.append(args)


def changed_run(self: Any, *args: Any, launch_grid: Any, **kwargs: Any) -> None:
    """`JITFunction.run` as another release might define it."""


def test_the_installed_triton_is_what_direct_launches_expect() -> None:
    mismatch = internals.find_mismatch()
    assert mismatch is None, (
        f"{mismatch}. Kernels still run, through Triton's own launch path. Compare "
        "penstock/kernels/triton_internals.py with this release, then extend TESTED_RELEASES."
    )


def test_a_direct_launch_passes_what_triton_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.compiler import GPUTarget

    active = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 77,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(type(internals.driver), "active", active)
    monkeypatch.setattr(internals, "_getters", (active.get_current_device, active.get_current_stream))
    compiled = CompiledKernel()
    monkeypatch.setattr(internals.JITFunction, "_do_compile", lambda self, *args: compiled)
    kernel = launch.Kernel(scale, ("count",))
    args = torch.zeros(64), torch.zeros(64), 8, 0.5
    for _ in range(2):
        kernel[(3,)](*args, BLOCK=16, num_warps=4)
    assert kernel.num_direct_launches == 1
    theirs, ours = compiled.launches
    told = f"Triton {triton.__version__} passes {theirs} to a compiled kernel; penstock passes {ours}"
    assert len(theirs) == len(ours), told
    assert theirs[:6] == ours[:6] == (3, 1, 1, 77, 55, (4, 1)), told
    for given, passed in zip(theirs[9:], ours[9:], strict=True):  # after the launch metadata and two hooks
        assert given is passed or given == passed, told


def test_a_kernel_without_scratch_memory_is_called_as_the_launcher_calls_it() -> None:
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    launches: list[tuple[Any, ...]] = []
    launcher = object.__new__(driver.CudaLauncher)
    launcher.__dict__ |= {
        "launch": lambda *args: launches.append(args),
        "num_ctas": 1,
        "global_scratch_size": 0,
        "global_scratch_align": 1,
        "profile_scratch_size": 0,
        "profile_scratch_align": 1,
        "launch_cooperative_grid": False,
        "launch_pdl": True,
    }
    compiled = SimpleNamespace(run=launcher, function=55, packed_metadata=(4, 1))
    launcher(3, 1, 1, 77, 55, (4, 1), None, None, None, "x", 8)
    direct = internals.direct_launcher(compiled)
    assert direct is not None and direct.call is launcher.launch
    direct.call(3, 1, 1, 77, *direct.leading, "x", 8)
    assert launches[0] == launches[1], f"Triton {triton.__version__} calls its launcher in another way"


def test_a_kernel_with_scratch_memory_is_called_through_the_launcher() -> None:
    launcher = SimpleNamespace(launch=None, global_scratch_size=16, profile_scratch_size=0, launch_pdl=False)
    direct = internals.direct_launcher(SimpleNamespace(run=launcher, function=55, packed_metadata=(4, 1)))
    assert direct.call is launcher and direct.leading == (55, (4, 1), None, None, None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch: patch.setattr(triton, "__version__", "9.9.0"), "Triton 9.9.0 is not a tested release"),
        (lambda patch: patch.setattr(internals.JITFunction, "run", changed_run), "JITFunction.run takes"),
        (lambda patch: patch.setattr(internals.CompiledKernel, "run", None), "CompiledKernel.run"),
        (lambda patch: patch.setattr(internals, "_import_error", "no module named x"), "no module named x"),
    ],
)
def test_another_release_is_launched_by_triton_itself_with_one_warning(
    change: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(language, "HAS_TRITON", True)
    monkeypatch.setattr(language, "IS_INTERPRETED", False)
    change(monkeypatch)
    with caplog.at_level(logging.WARNING, "penstock.kernels"):
        assert not language.can_launch_directly()
    (record,) = caplog.records
    assert reason in record.getMessage() and triton.__version__ in record.getMessage()


OTHER_RELEASE = """
import json, logging, torch, triton
warnings = []
handler = logging.Handler()
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("penstock.kernels").addHandler(handler)
torch.cuda.is_available = lambda: True  # so that the kernels are defined
triton.__version__ = "9.9.0"
from penstock.kernels import activation, attention, gate_up, language, norm, pooling, sampling
modules = activation, attention, norm, pooling, sampling
kernels = [value for module in modules for value in vars(module).values()
           if isinstance(value, triton.JITFunction)]
print(json.dumps({
    "warnings": warnings,
    "classes": sorted({type(kernel).__name__ for kernel in kernels}),
    "gluon": language.HAS_GLUON,
    "gate_up": gate_up.GateUp.of(torch.zeros(256, 64), "silu", True) is not None,
    "precompile": language.precompile(2) is not None,
    "precompiling": language.is_precompiling(),
}))
"""


def test_all_kernels_of_another_release_are_triton_s_own() -> None:
    """Imports all kernels as under another release, in a process of its own, because kernels are created at
    import."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    ran = subprocess.run(
        [sys.executable, "-c", OTHER_RELEASE], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    (warning,) = found.pop("warnings")
    assert "Triton 9.9.0 is not a tested release" in warning
    assert found == {
        "classes": ["JITFunction"],
        "gluon": False,
        "gate_up": False,
        "precompile": False,
        "precompiling": False,
    }


def test_the_public_path_gives_the_same_values(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(language, "_LAUNCHES_DIRECTLY", False)
    kernel = language.jit(unspecialized=("count",))(scale)
    assert not isinstance(kernel, launch.Kernel)
    x = torch.arange(64, dtype=torch.float32, device=device)
    expected = torch.where(x < 40, x * 0.5, 0)

    def launched(run: Any) -> torch.Tensor:
        out = torch.zeros_like(x)
        run(out)
        return out

    bound = language.bind(kernel, BLOCK=16, num_warps=1)
    swapped = language.bind(kernel, (1, 0), BLOCK=16, num_warps=1)
    for run in (
        lambda out: kernel[(4,)](x, out, 40, 0.5, BLOCK=16, num_warps=1),
        lambda out: bound(4, x, out, 40, 0.5),
        lambda out: swapped(4, out, x, 40, 0.5),
        lambda out: language.replay(bound, 4, x, out, 40, 0.5)(),
    ):
        assert torch.equal(launched(run), expected)


def test_no_other_module_uses_undocumented_parts_of_triton() -> None:
    root = Path(penstock.__file__).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        if path.name == "triton_internals.py" or "triton" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                parts = name.split(".")
                hidden = {"runtime", "compiler", "backends", "knobs"} & set(parts[1:2])
                if parts[0] == "triton" and (hidden or any(part.startswith("_") for part in parts)):
                    found.append(f"{path.relative_to(root)}: {name}")
    assert not found
