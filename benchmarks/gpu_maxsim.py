"""MaxSim on one GPU: the kernel compared with flash-maxsim's packed and rerank kernels and a padded product.

    python benchmarks/gpu_maxsim.py [--tune] [--save FILE] [--seconds 85]

Checks the kernel against fp64 first. Figures are medians of device time. The contenders take turns. Before
each call, a write clears the cache and lets the host run ahead. flash-maxsim is optional; it autotunes before
anything is timed. With --tune, other tilings of the kernel are measured afterwards, as long as time is left.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.maxsim import Tiling, choose_tiling, maxsim, maxsim_triton

DIM = 128
SHAPES = (("32 × 300", 32, 300), ("128 × 1024", 128, 1024), ("32 × 10…2048", 32, None))
COUNTS = (10_000, 1_000)
DTYPES = (torch.bfloat16, torch.float16)
ROUNDS = 20


@dataclass(frozen=True)
class Case:
    name: str
    count: int
    dtype: torch.dtype
    query: Tensor  # [query tokens, dim]
    documents: Tensor  # [tokens, dim]
    lengths: Tensor  # [documents]
    cu_lengths: Tensor  # [documents + 1]
    longest: int

    @property
    def starts(self) -> Tensor:
        return self.cu_lengths[:-1]

    def arguments(self) -> dict[str, Any]:
        zero = torch.zeros(1, dtype=torch.int32, device="cuda")
        return {
            "queries": self.query,
            "documents": self.documents,
            "query_starts": zero,
            "query_lengths": zero + len(self.query),
            "document_starts": self.starts,
            "document_lengths": self.lengths,
            "max_query_length": len(self.query),
            "max_document_length": self.longest,
        }


def make_case(name: str, query_length: int, length: int | None, count: int, dtype: torch.dtype) -> Case:
    torch.manual_seed(0)
    lengths = torch.randint(10, 2049, (count,)) if length is None else torch.full((count,), length)
    cu_lengths = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])

    def unit(tokens: int) -> Tensor:
        return torch.empty(tokens, DIM, device="cuda", dtype=dtype).normal_(std=DIM**-0.5)

    return Case(
        name,
        count,
        dtype,
        unit(query_length),
        unit(int(cu_lengths[-1])),
        lengths.int().cuda(),
        cu_lengths.int().cuda(),
        int(lengths.max()),
    )


# Correctness


def naive(inputs: dict[str, Any]) -> Tensor:
    """Scores in fp64, pair by pair."""

    def rows(values: Tensor, scales: Tensor | None, start: int, length: int) -> Tensor:
        part = values[start : start + length].double()
        return part if scales is None else part * scales[start : start + length, None].double()

    names = ("query_starts", "query_lengths", "document_starts", "document_lengths")
    qs, ql, ds, dl = (inputs[name].tolist() for name in names)
    scores = []
    for q, d in zip(inputs["pair_queries"].tolist(), inputs["pair_documents"].tolist(), strict=True):
        query = rows(inputs["queries"], inputs.get("query_scales"), qs[q], ql[q])
        document = rows(inputs["documents"], inputs.get("document_scales"), ds[d], dl[d])
        empty = not len(query) or not len(document)
        scores.append(query.new_zeros(()) if empty else (query @ document.T).amax(1).sum())
    return torch.stack(scores)


def check(dtype: torch.dtype, dim: int, longest_query: int, scales: bool) -> float:
    """The largest error, relative to the largest score, over random pairs with empty and one-token sides."""
    generator = torch.Generator().manual_seed(dim + longest_query)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator, dtype=torch.int32)

    query_lengths = torch.cat([torch.tensor([0, 1, longest_query]), integers(longest_query + 1, 5)]).int()
    document_lengths = torch.cat([torch.tensor([0, 1, 64, 65, 2048]), integers(400, 40)]).int()
    inputs: dict[str, Any] = {"max_query_length": longest_query, "max_document_length": 2048}
    for side, lengths in (("query", query_lengths), ("document", document_lengths)):
        tokens = int(lengths.sum())
        values = torch.randn(tokens, dim, generator=generator)
        values = (values * 40).clamp(-127, 127).to(dtype) if dtype == torch.int8 else values.to(dtype)
        inputs["queries" if side == "query" else "documents"] = values.cuda()
        inputs[f"{side}_starts"] = (lengths.cumsum(0) - lengths).int().cuda()
        inputs[f"{side}_lengths"] = lengths.cuda()
        if scales:
            inputs[f"{side}_scales"] = torch.rand(tokens, generator=generator).cuda()
    inputs["pair_queries"], inputs["pair_documents"] = integers(8, 300).cuda(), integers(45, 300).cuda()
    wanted, got = naive(inputs), maxsim(**inputs)
    error = float((got.double() - wanted).abs().max() / wanted.abs().max())
    return max(error, check_groups(inputs)) if dim in (100, 128) else error


def check_groups(inputs: dict[str, Any]) -> float:
    """The same documents with one query and several pairs per program."""
    inputs = inputs | {
        "query_starts": inputs["query_starts"][2:3],
        "query_lengths": inputs["query_lengths"][2:3],
    }
    del inputs["pair_queries"]
    wanted = naive(inputs | {"pair_queries": torch.zeros_like(inputs["pair_documents"])})
    values = inputs["queries"]
    longest = inputs["max_query_length"]
    tiling = choose_tiling(values.dtype, values.shape[1], longest, 2048, len(wanted), one_query=True)
    got = maxsim_triton(**inputs, tiling=replace(tiling, group=4))
    return float((got.double() - wanted).abs().max() / wanted.abs().max())


def check_all() -> list[str]:
    lines = ["| dtype | largest relative error | of | allowed |", "|---|---|---|---|"]
    shapes = [(128, 32), (96, 32), (100, 20), (128, 300), (256, 64), (768, 32), (1024, 128)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int8):
        allowed = 1e-3 if dtype in (torch.bfloat16, torch.float16) else 1e-5
        errors = []
        for dim, query in shapes:
            try:
                errors.append(check(dtype, dim, query, scales=dtype == torch.int8 or dim == 100))
            except Exception:
                print(f"FAILED {dtype} dim {dim} query {query}")
                traceback.print_exc()
                errors.append(float("nan"))
        verdict = "ok" if all(error <= allowed for error in errors) else "TOO LARGE"
        print(f"check {short(dtype)}: {verdict} {[f'{error:.1e}' for error in errors]}", flush=True)
        lines.append(
            f"| {short(dtype)} | {max(errors):.1e} | {len(errors)} shapes | {allowed:.0e} ({verdict}) |"
        )
    return lines


# Contenders


def padded_product(case: Case) -> Callable[[], Tensor]:
    """The usual padded product. Documents are padded in advance; that is not timed."""
    padded = case.documents.new_zeros(case.count, case.longest, DIM)
    places = torch.arange(case.longest, device="cuda")
    there = places < case.lengths[:, None]
    padded[there] = case.documents
    hidden = None if bool(there.all()) else ~there[:, :, None]

    def run() -> Tensor:
        found = padded @ case.query.T
        if hidden is not None:
            found.masked_fill_(hidden, float("-inf"))
        return found.amax(1).float().sum(1)

    return run


def contenders(case: Case) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    yield "penstock", partial(maxsim, **case.arguments())
    try:
        import flash_maxsim as flash
    except Exception as error:
        print(f"flash-maxsim is not here: {error!r}")
    else:
        yield "flash packed", partial(flash.flash_maxsim_packed, case.query, case.documents, case.cu_lengths)
        yield (
            "flash rerank",
            partial(flash.flash_maxsim_rerank, case.query, case.documents, case.cu_lengths, case.longest),
        )
    try:
        yield "padded", padded_product(case)
    except Exception as error:
        print(f"padded: {error!r}")


@dataclass(frozen=True)
class Found:
    ms: float
    extra_mib: float
    error: float


def warm(case: Case) -> dict[str, tuple[Callable[[], Tensor], float, float]]:
    """The contenders that run, each with a call's memory beyond its inputs and its difference to the
    first."""
    ready: dict[str, tuple[Callable[[], Tensor], float, float]] = {}
    wanted: Tensor | None = None
    for name, run in contenders(case):
        try:
            began = time.perf_counter()
            got = run()
            torch.cuda.synchronize()
            if (took := time.perf_counter() - began) > 2:
                print(f"  {name}: first call took {took:.1f} s", flush=True)
            wanted = got if wanted is None else wanted
            error = float((got - wanted).abs().max() / wanted.abs().max())
            del got
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            torch.cuda.synchronize()
            ready[name] = run, (torch.cuda.max_memory_allocated() - before) / 2**20, error
        except Exception as problem:
            print(f"  {name} failed: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
    return ready


class Clock:
    def __init__(self) -> None:
        self.block = torch.empty(2**30, dtype=torch.uint8, device="cuda")

    def __call__(self, run: Callable[[], Tensor]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.block.zero_()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


def compare(case: Case, clock: Clock) -> dict[str, Found]:
    ready = warm(case)
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(ROUNDS):
        for name, (run, _, _) in ready.items():
            times[name].append(clock(run))
    return {name: Found(statistics.median(times[name]), ready[name][1], ready[name][2]) for name in ready}


def host_us(case: Case) -> dict[str, float]:
    """Host time of a call with almost no work for the device."""
    costs = {}
    for name, (run, _, _) in warm(case).items():
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(100):
            run()
        costs[name] = (time.perf_counter() - began) * 1e4
        torch.cuda.synchronize()
    return costs


# Tuning


def chosen_tiling(case: Case) -> Tiling:
    return choose_tiling(case.dtype, DIM, len(case.query), case.longest, case.count, one_query=True)


def tilings(case: Case) -> Iterator[Tiling]:
    """Tilings that fit the device, the chosen one first."""
    chosen = chosen_tiling(case)
    yield chosen
    seen = {chosen}
    blocks = itertools.product((64, 128, 256), (4, 8), (2, 3, 4, 5), (1, 2, 4))
    for document, warps, stages, group in blocks:
        tiling = Tiling(chosen.query, document, chosen.dim, warps, stages, group)
        memory = (document * stages + chosen.query) * DIM * case.dtype.itemsize + 1024
        places = document * chosen.query // (32 * warps)  # per thread, held twice in registers
        longs = group * case.longest > 4096 or case.count // group < 400
        if (
            tiling not in seen
            and memory <= 227 * 1024
            and places <= 96
            and document >= 16 * warps
            and not longs
        ):
            yield tiling


def tune(case: Case, clock: Clock, deadline: float) -> str:
    found: list[tuple[float, Tiling]] = []
    arguments = case.arguments()
    for tiling in tilings(case):
        if time.perf_counter() > deadline:
            print("  out of time")
            break
        try:
            run = partial(maxsim_triton, **arguments, tiling=tiling)
            run()
            found.append((statistics.median(clock(run) for _ in range(9)), tiling))
        except Exception as problem:
            print(f"  {tiling}: {type(problem).__name__}: {str(problem)[:200]}")
    found.sort(key=lambda pair: pair[0])
    chosen = chosen_tiling(case)
    mine = next((ms for ms, tiling in found if tiling == chosen), float("nan"))
    print(f"tune {case.name} × {case.count:,} {short(case.dtype)}: chosen {mine:.4f} ms")
    for ms, tiling in found[:6] + found[-1:]:
        print(f"  {ms:.4f} ms {tiling}", flush=True)
    return f"{case.name} × {case.count:,}: chosen {mine:.4f}, best {found[0][0]:.4f} ms {found[0][1]}"


# Report


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def row(case: Case, found: dict[str, Found]) -> str:
    mine = found["penstock"]
    rate = case.documents.numel() * case.documents.element_size() / mine.ms / 1e9
    cells = [f"{case.name} × {case.count:,}", short(case.dtype), f"{mine.ms:.3f}", f"{rate:.2f}"]
    for name in ("flash packed", "flash rerank", "padded"):
        other = found.get(name)
        cells.append(f"{other.ms:.3f} ({other.ms / mine.ms:.2f}×)" if other else "–")
    cells.append(" / ".join(f"{found[n].extra_mib:,.1f}" if n in found else "–" for n in NAMES))
    return "| " + " | ".join(cells) + " |"


NAMES = ("penstock", "flash packed", "flash rerank", "padded")
HEAD = [
    "| query × document tokens × documents | dtype | penstock ms | TB/s read | flash packed ms | "
    "flash rerank ms | padded product ms | extra MiB of each |",
    "|---|---|---|---|---|---|---|---|",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--seconds", type=float, default=85)
    options = parser.parse_args()
    began = time.perf_counter()
    torch.set_grad_enabled(False)
    checks = check_all()
    print(f"checked after {time.perf_counter() - began:.0f} s", flush=True)
    clock, lines, notes = Clock(), list(HEAD), []
    for count, shape, dtype in itertools.product(COUNTS, SHAPES, DTYPES):
        try:
            case = make_case(*shape, count, dtype)
            found = compare(case, clock)
            lines.append(row(case, found))
            max_distance = {name: f"{one.error:.0e}" for name, one in found.items()}
            print(lines[-1], "difference to penstock:", max_distance, flush=True)
        except Exception:
            traceback.print_exc()
        case = None
        torch.cuda.empty_cache()
    try:
        costs = host_us(make_case("32 × 10", 32, 10, 8, torch.float16))
        notes.append("Host time of a call: " + ", ".join(f"{n} {us:.0f} µs" for n, us in costs.items()) + ".")
    except Exception:
        traceback.print_exc()
    print(f"compared after {time.perf_counter() - began:.0f} s", flush=True)
    if options.tune:
        left = list(itertools.product(SHAPES, COUNTS))
        while left:
            now = time.perf_counter()
            deadline = now + max(3.0, (began + options.seconds - now) / len(left))
            shape, count = left.pop(0)
            try:
                notes.append(tune(make_case(*shape, count, torch.bfloat16), clock, deadline))
            except Exception:
                traceback.print_exc()
            torch.cuda.empty_cache()
    report(checks, lines, notes, options.save)
    print(f"done in {time.perf_counter() - began:.0f} s")


def report(checks: list[str], lines: list[str], notes: list[str], save: Path | None) -> None:
    try:
        flash = metadata.version("flash-maxsim")
    except metadata.PackageNotFoundError:
        flash = "none"
    versions = f"Python {platform.python_version()} · torch {torch.__version__} · flash-maxsim {flash}"
    text = "\n".join(
        [
            "# MaxSim on a GPU",
            "",
            f"{date.today()} · {torch.cuda.get_device_name()} · {versions} · dim {DIM}",
            "",
            "`python benchmarks/gpu_maxsim.py`: medians of device time; in brackets, times penstock's.",
            "flash-maxsim computes in float16 and converts bfloat16 documents in each call.",
            "",
            *checks,
            "",
            *(f"{note}\n" for note in notes),
            *lines,
            "",
        ]
    )
    print(text)
    if save:
        save.parent.mkdir(parents=True, exist_ok=True)
        save.write_text(text)


if __name__ == "__main__":
    main()
