"""Direct launches: which compiled kernel is used, and which launches go through Triton."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels import language

launch = pytest.importorskip("penstock.kernels.launch")
tl = pytest.importorskip("triton.language")
knobs = pytest.importorskip("triton.knobs")
_async_compile = pytest.importorskip("triton.runtime._async_compile")

KERNELS = Path(language.__file__).parent


def _scaled(
    x: tl.tensor, out: tl.tensor, count: tl.tensor, scale: tl.tensor, BLOCK: tl.constexpr, TWICE: tl.constexpr
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0) * scale
    if TWICE:
        value *= 2
    tl.store(out + at, value, mask=at < count)


class Compiled:
    """Replaces a kernel that Triton has compiled, and records its launches."""

    packed_metadata = (1,)

    def __init__(self, number: int) -> None:
        self.function = number
        self.launches: list[tuple[Any, ...]] = []

    def run(self, *args: Any) -> None:
        self.launches.append(args)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = launch.Kernel(_scaled, ("count",))
    made.compiled = []

    def run(*args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        made.compiled.append(Compiled(len(made.compiled)))
        return made.compiled[-1]

    monkeypatch.setattr(made, "run", run)
    monkeypatch.setattr(launch, "current_device_and_stream", lambda: (0, 77))
    return made


def call(kernel: Any, x: Tensor, count: Any = 8, scale: Any = 0.5, **constants: Any) -> None:
    kernel[(3,)](x, x, count, scale, **({"BLOCK": 16, "TWICE": False, "num_warps": 4} | constants))


def test_the_second_launch_is_direct(kernel: Any) -> None:
    x, y = torch.zeros(64), torch.zeros(32)
    call(kernel, x)
    call(kernel, y, count=5, scale=0.25)
    assert len(kernel.compiled) == 1 and kernel.num_direct_launches == 1
    (args,) = kernel.compiled[0].launches
    assert args[:9] == (3, 1, 1, 77, 0, (1,), None, None, None)
    assert args[9] is y and args[11:] == (5, 0.25, 16, False)


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(64, dtype=torch.float16)},
        {"BLOCK": 32},
        {"TWICE": True},
        {"TWICE": 0},
        {"num_warps": 8},
    ],
)
def test_another_constant_needs_another_compiled_kernel(kernel: Any, change: dict[str, Any]) -> None:
    usual = {"x": torch.zeros(64)}
    for options in (usual, usual | change, usual, usual | change):
        call(kernel, **options)
    assert len(kernel.compiled) == 2 and kernel.num_direct_launches == 2
    assert [len(each.launches) for each in kernel.compiled] == [1, 1]


@pytest.mark.parametrize(
    "change", [{"x": torch.zeros(64)[1:]}, {"scale": 2}, {"count": 1 << 31}, {"count": True}]
)
def test_arguments_that_triton_may_specialize_on_go_through_triton(
    kernel: Any, change: dict[str, Any]
) -> None:
    for _ in range(3):
        call(kernel, **({"x": torch.zeros(64)} | change))
    assert kernel.num_direct_launches == 0 and len(kernel.compiled) == 3


def test_another_device_has_its_own_compiled_kernel(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call(kernel, torch.zeros(64))
    monkeypatch.setattr(launch, "current_device_and_stream", lambda: (1, 77))
    call(kernel, torch.zeros(64))
    assert len(kernel.compiled) == 2


def test_launch_hooks_see_every_launch(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call(kernel, torch.zeros(64))
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", SimpleNamespace(calls=[print]))
    call(kernel, torch.zeros(64))
    assert kernel.num_direct_launches == 0


def test_an_absent_argument_is_part_of_the_compiled_kernel(kernel: Any) -> None:
    x = torch.zeros(64)
    options = {"BLOCK": 16, "TWICE": False, "num_warps": 4}
    for _ in range(3):
        kernel[(3,)](x, None, 8, 0.5, **options)
    assert len(kernel.compiled) == 1 and kernel.num_direct_launches == 2
    assert kernel.compiled[0].launches[0][9:] == (x, None, 8, 0.5, 16, False)
    kernel[(3,)](x, x, 8, 0.5, **options)  # goes through Triton
    assert len(kernel.compiled) == 2 and kernel.num_direct_launches == 2


def test_a_tensor_descriptor_is_told_apart_by_its_block_and_dtype(kernel: Any) -> None:
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16

    def pieces(rows: int, x: Tensor) -> Any:
        layout = NVMMASharedLayout.get_default_for([rows, 64], bfloat16)
        return launch.TensorDescriptor.from_tensor(x, [rows, 64], layout)

    x, y = (torch.zeros(count, 64, dtype=torch.bfloat16) for count in (128, 256))
    options = {"BLOCK": 16, "TWICE": False, "num_warps": 4}
    for rows, tensor in ((64, x), (64, y), (128, x), (64, x.half()), (128, y)):
        kernel[(3,)](pieces(rows, tensor), x, 8, 0.5, **options)
    assert len(kernel.compiled) == 3 and kernel.num_direct_launches == 2
    kernel[(3,)](x, x, 8, 0.5, **options)  # goes through Triton
    assert len(kernel.compiled) == 4 and kernel.num_direct_launches == 2
    bound = kernel.bind(None, **options)
    for _ in range(2):
        bound(3, pieces(64, x), x, 8, 0.5)
    assert len(kernel.compiled) == 6


def test_an_unfamiliar_compiled_kernel_is_never_remembered(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "run", lambda *args, **more: None)
    call(kernel, torch.zeros(64))
    assert not kernel.compiled_kernels


def test_a_bound_kernel_gets_addresses_from_its_second_launch_on(kernel: Any) -> None:
    x, y = torch.zeros(64), torch.zeros(32)
    bound = kernel.bind(None, BLOCK=16, TWICE=False, num_warps=4)
    bound(3, x, x, 8, 0.5)
    bound(2, y, x, 5, 0.25)
    assert len(kernel.compiled) == 1 and kernel.num_direct_launches == 1
    (args,) = kernel.compiled[0].launches
    assert args[:9] == (2, 1, 1, 77, 0, (1,), None, None, None)
    assert args[9:] == (y.data_ptr(), x.data_ptr(), 5, 0.25, 16, False)


def test_a_bound_kernel_has_a_compiled_kernel_for_each_dtype_and_device(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = kernel.bind(None, BLOCK=16, TWICE=False, num_warps=4)
    wide, narrow = torch.zeros(64), torch.zeros(64, dtype=torch.float16)
    for x in (wide, narrow, wide, narrow):
        bound(3, x, wide, 8, 0.5)
    assert len(kernel.compiled) == 2 and kernel.num_direct_launches == 2
    monkeypatch.setattr(launch, "current_device_and_stream", lambda: (1, 77))
    bound(3, wide, wide, 8, 0.5)
    assert len(kernel.compiled) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(64)[1:]},
        {"x": 7},
        {"x": None},
        {"scale": 2},
        {"count": 1 << 31},
        {"count": True},
        {"count": torch.zeros(1)},
    ],
)
def test_arguments_of_a_bound_kernel_that_triton_may_specialize_on_go_through_triton(
    kernel: Any, change: dict[str, Any]
) -> None:
    bound = kernel.bind(None, BLOCK=16, TWICE=False, num_warps=4)
    given = {"x": torch.zeros(64), "count": 8, "scale": 0.5}
    for options in (given, given | change, given | change):
        bound(3, options["x"], torch.zeros(64), options["count"], options["scale"])
    assert kernel.num_direct_launches == 0 and len(kernel.compiled) == 3
    bound(3, torch.zeros(64), torch.zeros(64), 8, 0.5)
    assert kernel.num_direct_launches == 1


def test_launch_hooks_see_launches_of_bound_kernels(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = kernel.bind(None, BLOCK=16, TWICE=False, num_warps=4)
    args = torch.zeros(64), torch.zeros(64), 8, 0.5
    bound(3, *args)
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, "launch_exit_hook", SimpleNamespace(calls=[print]))
        bound(3, *args)
        assert kernel.num_direct_launches == 0
    bound(3, *args)
    assert kernel.num_direct_launches == 1


def test_a_kernel_of_triton_gets_its_constants_at_each_launch() -> None:
    launches: list[Any] = []

    class Plain:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **constants: launches.append((grid, args, constants))

    language.bind(Plain(), BLOCK=16)(3, "x", 8)
    language.bind(Plain(), (1, 0, 0), BLOCK=16)(2, "x", "y", 8)
    assert launches == [((3,), ("x", 8), {"BLOCK": 16}), ((2,), ("y", "x", "x", 8), {"BLOCK": 16})]


def test_one_tensor_can_be_taken_by_several_parameters(kernel: Any) -> None:
    bound = kernel.bind((0, 0), BLOCK=16, TWICE=False, num_warps=4)
    x, y = torch.zeros(64), torch.zeros(64)
    bound(3, x, 8, 0.5)
    bound(3, y, 5, 0.25)
    bound(3, y[1:], 5, 0.25)  # goes through Triton
    bound(3, y, 1 << 31, 0.25)
    (args,) = kernel.compiled[0].launches
    assert args[9:] == (y.data_ptr(), y.data_ptr(), 5, 0.25, 16, False)
    assert kernel.num_direct_launches == 1 and len(kernel.compiled) == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_bound_kernel_gives_the_same_on_both_paths(device: torch.device) -> None:
    made = language.jit(unspecialized=("count",))(_scaled)
    if not isinstance(made, launch.Kernel):
        pytest.skip("kernels of this Triton release are not launched directly")
    bound = made.bind(None, BLOCK=16, TWICE=True, num_warps=1)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        for first in (0, 1):
            for count in (20, 9):
                x = torch.randn(64, device=device, dtype=dtype)[first:]
                out = torch.zeros_like(x)
                bound(4, x, out, count, 0.5)
                expected = torch.where(torch.arange(len(x), device=device) < count, x, 0)
                torch.testing.assert_close(out, expected)
    assert made.num_direct_launches == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_direct_launches_give_the_same_as_triton(device: torch.device) -> None:
    made = language.jit(unspecialized=("count",))(_scaled)
    if not isinstance(made, launch.Kernel):
        pytest.skip("kernels of this Triton release are not launched directly")
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        for twice in (False, True, True, False):
            for first in (0, 1):
                x = torch.randn(64, device=device, dtype=dtype)[first:]
                out = torch.zeros_like(x)
                made[(2,)](x, out, 20, 0.5, BLOCK=16, TWICE=twice, num_warps=1)
                expected = torch.where(
                    torch.arange(len(x), device=device) < 20, x * (1.0 if twice else 0.5), 0
                )
                torch.testing.assert_close(out, expected)
    assert made.num_direct_launches == 8


def test_a_replayed_launch_checks_its_arguments_once(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = kernel.bind((0, 0), BLOCK=16, TWICE=False, num_warps=4)
    x = torch.zeros(64)
    again = language.replay(bound, 3, x, 8, 0.5)
    again()  # compiles
    again()  # is launched directly
    assert len(kernel.compiled) == 1 and kernel.num_direct_launches == 1
    monkeypatch.setattr(launch, "_address", None)  # arguments are not checked any more
    again()
    again()
    launches = kernel.compiled[0].launches
    assert len(launches) == 3 and kernel.num_direct_launches == 1 and len(set(launches)) == 1
    assert launches[0][9:] == (x.data_ptr(), x.data_ptr(), 8, 0.5, 16, False)


def test_a_replay_of_an_unusual_launch_goes_through_triton_each_time(kernel: Any) -> None:
    bound = kernel.bind(None, BLOCK=16, TWICE=False, num_warps=4)
    bound(3, torch.zeros(64), torch.zeros(64), 8, 0.5)
    again = language.replay(bound, 3, torch.zeros(64)[1:], torch.zeros(64), 8, 0.5)
    for _ in range(3):
        again()
    assert kernel.num_direct_launches == 0 and len(kernel.compiled) == 4


def test_a_launch_of_triton_is_replayed_as_it_is() -> None:
    launches: list[Any] = []
    again = language.replay(lambda *args: launches.append(args), 3, "x", 8)
    again()
    again()
    assert launches == [(3, "x", 8)] * 2


def test_precompiled_kernels_are_compiled_in_threads_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake compiler replaces Triton's. The threads also load each kernel."""
    threads: list[str] = []

    class Made:
        @property
        def run(self) -> Any:
            threads.append(threading.current_thread().name)
            return lambda *args: None

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        mode = _async_compile.active_mode.get()
        assert warmup is (mode is not None)
        return Made() if mode is None else mode.submit(constants["BLOCK"], Made, lambda kernel: None)

    monkeypatch.setattr(launch.JITFunction, "run", run)
    monkeypatch.setattr(launch, "current_device_and_stream", lambda: (0, 77))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    kernel = launch.Kernel(_scaled, ("count",))
    bound = kernel.bind(None, BLOCK=64, TWICE=False)
    x = torch.zeros(64)
    with launch.precompile(2):
        for block in (16, 32, 16):
            kernel[(3,)](x, x, 8, 0.5, BLOCK=block, TWICE=False)
        bound(3, x, x, 8, 0.5)
    assert len(threads) == 3 and all(name.startswith("penstock-compile") for name in threads)
    assert not kernel.compiled_kernels and not bound.compiled_kernels and kernel.num_direct_launches == 0
    bound(3, x, x, 8, 0.5)  # runs again


def test_compiled_kernels_do_not_run_while_others_are_precompiled(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their inputs may be outputs of a kernel that did not run, such as expert counts."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    x = torch.zeros(64)
    bound = kernel.bind(None, BLOCK=64, TWICE=False)
    again = bound.replay(3, x, x, 8, 0.5)
    launches: list[Callable[[], Any]] = [
        lambda: kernel[(3,)](x, x, 8, 0.5, BLOCK=16, TWICE=False),
        lambda: bound(3, x, x, 8, 0.5),
        again,
    ]
    for run in launches * 2:
        run()
    before = [len(compiled.launches) for compiled in kernel.compiled]
    with launch.precompile(1):
        for run in launches:
            run()
        assert [len(compiled.launches) for compiled in kernel.compiled] == before
        with ThreadPoolExecutor(1) as pool:  # another thread needs its results
            for run in launches:
                pool.submit(run).result()
    assert sum(len(compiled.launches) for compiled in kernel.compiled) == sum(before) + len(launches)
    for run in launches:
        run()
    assert sum(len(compiled.launches) for compiled in kernel.compiled) == sum(before) + 2 * len(launches)


def test_other_threads_run_kernels_while_one_precompiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of one thread may read weights while another thread compiles the kernels of experts."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with launch.precompile(1), ThreadPoolExecutor(1) as pool:
        assert launch.is_precompiling()
        assert not pool.submit(launch.is_precompiling).result()
    assert not launch.is_precompiling()


def test_a_kernel_that_cannot_be_compiled_raises_when_it_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused() -> Any:
        raise ValueError("no such form")

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        mode = _async_compile.active_mode.get()
        return refused() if mode is None else mode.submit(1, refused, lambda kernel: None)

    monkeypatch.setattr(launch.JITFunction, "run", run)
    monkeypatch.setattr(launch, "current_device_and_stream", lambda: (0, 77))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    kernel = launch.Kernel(_scaled, ("count",))
    with launch.precompile(2):
        call(kernel, torch.zeros(64))
    with pytest.raises(ValueError, match="no such form"):
        call(kernel, torch.zeros(64))


def test_kernels_that_may_be_launched_early_wait_for_their_inputs() -> None:
    """Exactly the kernels with `overlaps=True` call `wait_for_inputs`."""
    source = "".join(path.read_text() for path in sorted(KERNELS.glob("*.py")))
    found = re.findall(r"@jit\(([^\n]*)\)\ndef (\w+)\((.*?)(?=\n\n\n)", source, re.S)
    assert len(found) > 40
    for options, name, body in found:
        assert ("overlaps=True" in options) == ("wait_for_inputs()" in body), name


@pytest.mark.parametrize("capable", [True, False])
def test_overlapping_launches_are_compiled_for_gpus_that_support_them(
    capable: bool, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: list[dict[str, Any]] = []
    monkeypatch.setattr(kernel, "run", lambda *_, **given: options.append(given))
    monkeypatch.setattr(launch, "_can_overlap", lambda: capable)
    call(kernel, torch.zeros(8))
    kernel.overlaps = True
    call(kernel, torch.zeros(8))
    assert [each.get("launch_pdl", False) for each in options] == [False, capable]
