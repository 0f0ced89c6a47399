"""`penstock bench kernels`: each kernel compared with its reference and with the floor of this device.

The floor is the longer of two times: moving the case's bytes at the speed of a plain copy of that many bytes,
and computing its operations at the speed of a large matrix product. Both speeds are measured here. The host's
own work for the rows of a step is measured first; it has no floor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import torch
from torch import Tensor

from penstock.bench.console import note_if_busy, print_result
from penstock.bench.kernels.cases import Case, Place
from penstock.bench.kernels.host import HOST, HostMeasured, measure_host
from penstock.bench.kernels.registry import KERNELS
from penstock.bench.report.save import save_figures
from penstock.errors import BadValue
from penstock.layers.int8 import Int8Linear
from penstock.layers.linear import make_linear


class Measured(msgspec.Struct, frozen=True):
    kernel: str
    shape: str
    run_us: float
    reference_us: float
    floor_us: float
    error: float  # largest difference, relative to the reference's largest value


def bench_kernels(
    device: str,
    dtype: str,
    only: Sequence[str],
    min_time_s: float,
    threads: int | None,
    output_json: str | None,
) -> int:
    place = _place(device, dtype)
    if threads:
        torch.set_num_threads(threads)
    if unknown := [name for name in only if name not in (*KERNELS, *HOST)]:
        raise BadValue(f"--only {unknown[0]!r} is unknown; use {', '.join((*KERNELS, *HOST))}")
    note_if_busy()
    host = _measure_host([name for name in only or HOST if name in HOST], min_time_s)
    kernels = [name for name in only or KERNELS if name in KERNELS]
    floor = Floor(place, min_time_s)
    found = _measure_kernels(kernels, floor, min_time_s) if kernels else []
    _save(output_json, place, floor if kernels else None, found, host)
    return 0


def _measure_host(names: Sequence[str], min_time_s: float) -> list[HostMeasured]:
    if not names:
        return []
    print_result(f"{'host work':<22} {'rows':>6} {'host µs':>9} {'growth':>9}")
    found = []
    for name in names:
        for one in measure_host(HOST[name](), min_time_s):
            found.append(one)
            print_result(f"{one.kernel:<22} {one.rows:>6,} {one.host_us:>9.1f} {one.growth:>8.1f}×")
    return found


def _measure_kernels(names: Sequence[str], floor: Floor, min_time_s: float) -> list[Measured]:
    place = floor.place
    print_result(f"{place.device} {place.dtype}: {floor.flops_per_s() / 1e9:,.0f} GFLOP/s in a large product")
    print_result(
        f"{'kernel':<22} {'shape':<40} {'µs':>9} {'reference':>10} {'speed-up':>9} {'floor':>9} "
        f"{'of floor':>9} {'error':>9}"
    )
    found = []
    with torch.inference_mode():
        for name in names:
            for case in KERNELS[name](place):
                found.append(one := measure(case, floor, min_time_s))
                print_result(_row(one))
    return found


def measure(case: Case, floor: Floor, min_time_s: float) -> Measured:
    got, wanted = case.run().float(), case.reference().float()
    error = float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))
    return Measured(
        case.kernel,
        case.shape,
        clock(case.run, floor.place.device, min_time_s) * 1e6,
        clock(case.reference, floor.place.device, min_time_s) * 1e6,
        floor.seconds(case) * 1e6,
        error,
    )


class Floor:
    """The peak rates of this device, measured on first use."""

    def __init__(self, place: Place, min_time_s: float) -> None:
        self.place, self._min_time_s = place, min_time_s
        self._copies: dict[int, float] = {}
        self._products: dict[bool, float] = {}

    def flops_per_s(self, int8: bool = False) -> float:
        """FLOP/s of a large product with the fastest available implementation."""
        if int8 not in self._products:
            side = 1024 if self.place.device.type == "cpu" else 8192
            weight, x = self.place.random(side, side, scale=side**-0.5), self.place.random(side, side)
            ways: list[Callable[[Tensor], Tensor]]
            if int8:
                ways = [Int8Linear(weight, None)]
            else:
                ways = [make_linear(weight, None, "identity", None), partial(torch.matmul, weight)]
            took = min(clock(partial(way, x), self.place.device, self._min_time_s) for way in ways)
            self._products[int8] = 2 * side**3 / took
        return self._products[int8]

    def bytes_per_s(self, size: int) -> float:
        """Bytes/s of a copy that reads and writes about `size` bytes in total. Small copies stay in the
        cache."""
        power = max(14, (size - 1).bit_length())
        if power not in self._copies:
            source = torch.zeros(2 ** (power - 1), dtype=torch.uint8, device=self.place.device)
            target = torch.empty_like(source)
            took = clock(lambda: target.copy_(source), self.place.device, self._min_time_s)
            self._copies[power] = 2**power / took
        return self._copies[power]

    def seconds(self, case: Case) -> float:
        bytes_s = case.moved_bytes / self.bytes_per_s(case.moved_bytes)
        return max(bytes_s, case.flops / self.flops_per_s(case.int8)) if case.flops else bytes_s


def clock(run: Callable[[], Tensor], device: torch.device, min_time_s: float) -> float:
    """Seconds of one call, after two warm-up calls: the 10th percentile, because other processes can only
    add time."""
    for _ in range(2):
        run()
    times: list[float] = []
    while len(times) < 5 or sum(times) < min_time_s:
        times.append(_on_cuda(run) if device.type == "cuda" else _on_cpu(run))
    return sorted(times)[len(times) // 10]


def _on_cpu(run: Callable[[], Tensor]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _on_cuda(run: Callable[[], Tensor], repeats: int = 10) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / repeats


def _place(device: str, dtype: str) -> Place:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise BadValue(f"device {device!r} was asked for, but no CUDA device is here", param="device")
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise BadValue(f"dtype {dtype!r} is unknown; use auto, float32, bfloat16 or float16", param="dtype")
    return Place(torch.device(device), getattr(torch, dtype))


def _row(one: Measured) -> str:
    return (
        f"{one.kernel:<22} {one.shape:<40} {one.run_us:>9.1f} {one.reference_us:>10.1f} "
        f"{one.reference_us / one.run_us:>8.2f}× {one.floor_us:>9.1f} {one.floor_us / one.run_us:>9.0%} "
        f"{one.error:>9.1e}"
    )


def _save(
    path: str | None,
    place: Place,
    floor: Floor | None,
    found: Sequence[Measured],
    host: Sequence[HostMeasured],
) -> None:
    result = {
        "device": str(place.device),
        "dtype": str(place.dtype),
        "flops_per_s": None if floor is None else floor.flops_per_s(),
        "kernels": [msgspec.to_builtins(one) for one in found],
        "host": [msgspec.to_builtins(one) for one in host],
    }
    save_figures(path, result)
