"""Compile every kernel for several kinds of GPU, without a GPU, and check that it fits.

    python -m tests.kernels.compile_kernels [--all] [--only flash] [--targets 80 89] [--jobs 4] [--save FILE]

Each launch of `kernel_launches.py` is compiled and assembled as on a GPU of the target: same tiles, same
specialization. Without --all, each kernel is compiled once, and kernels with tiles once for each combination
of argument types. The targets take turns. The largest tiles are also compiled for the target with the least
shared memory. It needs a process of its own, because Triton decides at import whether kernels are compiled or
interpreted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.runtime import driver

torch.cuda.is_available = lambda: True  # otherwise the kernels are not defined

from penstock.kernels import language, launch, limits, triton_internals  # noqa: E402
from tests.kernels import kernel_launches  # noqa: E402

TARGETS = {80: "A100", 86: "A10, RTX 3090", 89: "L4, L40S, RTX 4090", 90: "H100, H200", 100: "B200"}
TARGETS |= {120: "RTX 5090, RTX PRO 6000"}
MAX_SPILLED_BYTES = 256  # register spills per thread
MAX_TENSOR_COLUMNS = 512  # columns of tensor memory, on GPUs that have it
# Of the targets with fp8, the one with the least shared memory. TIGHT kernels have tiles that fill it.
TIGHTEST = 89
TIGHT = {"_expert_matmul", "_block_matmul", "_maxsim_kernel"}
TILED = TIGHT | {
    "_flash",
    "_short",
    "_paged",
    "_few_rows",
    "_int4_matmul",
    "_shrink",
    "_expand",
    "_expand_gated",
    "_gate_up",
    "_lora_linear",
}
# Device functions: only other kernels call them.
HELPERS = {
    *("activate", "_distance_bias", "_key_tile", "_log1p_relu", "_philox", "_gumbel", "_apply_penalties"),
    *(
        "_ordered_key",
        "_from_ordered_key",
        "_dot",
        "load_float",
        "load_logits",
        "_weight",
        "_load_candidates",
    ),
    *("store_quantized", "quantize_group", "_difference", "_act", "_change", "_scaled_dot", "_write_order"),
    *("_write_tiles", "corner", "_copy", "_multiply", "_nan_max", "_keep", "wait_for_inputs"),
    *("from_fp8", "queries_in_fp16", "split_scales", "unpack_pairs"),
    *("act_of", "_next_slot", "_next_slots", "_load_slots", "_split", "_add_low_rank", "_fast_act"),
}
# Constants that describe a tile in the table.
TILE_CONSTANTS = ("QUERIES", "KEYS", "BLOCK", "TILE", "BLOCK_M", "BLOCK_Q", "BLOCK_N", "BLOCK_D", "BLOCK_K")


class Launch(NamedTuple):
    """A kernel launch as it would be on a GPU of the target."""

    target: int
    model: str
    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def types(self) -> tuple[str, ...]:
        return (self.name, *(_type_name(value) for value in self.args))

    @property
    def tile_values(self) -> int:
        """The approximate number of values in the tiles of all stages."""
        sizes = self.constants
        rows = sum(sizes.get(name, 0) for name in ("BLOCK_M", "BLOCK_Q", "BLOCK_N", "BLOCK_D"))
        return int(rows * sizes.get("BLOCK_K", 128) * sizes["num_stages"])

    @property
    def key(self) -> tuple[Any, ...]:
        return self.target, self.types, tuple(self.constants.items())


class Compiled(NamedTuple):
    """The resources of a compiled kernel on its target."""

    target: int
    model: str
    kernel: str
    tile: str
    warps: int
    stages: int
    shared_bytes: int
    registers: int
    spilled_bytes: int
    tensor_columns: int

    @property
    def fault(self) -> str | None:
        most = limits.SHARED_BYTES[divmod(self.target, 10)]
        what = f"{self.kernel} of {self.model}, {self.tile}, for sm_{self.target}"
        if self.shared_bytes > most:
            return f"{what} takes {self.shared_bytes} bytes of shared memory; there are {most}"
        if self.spilled_bytes > MAX_SPILLED_BYTES:
            return f"{what} spills {self.spilled_bytes} bytes of registers in each thread"
        if self.tensor_columns > MAX_TENSOR_COLUMNS:
            return f"{what} takes {self.tensor_columns} columns of tensor memory; there are 512"
        return None


class Recorder:
    """Replaces the GPU driver and Penstock's launches, and records what would be launched."""

    def __init__(self) -> None:
        self.target = 90
        self.launches: dict[tuple[Any, ...], Launch] = {}

    def install(self) -> None:
        language.set_kernel_devices("cpu")
        driver.set_active(self)
        triton_internals._getters = (lambda: self.target, lambda device: 0)
        launch._precompiling.set(True)
        launch._can_overlap = lambda: False  # overlapping launches do not change the compiled kernel
        launch.launch_by_triton = self._note
        nvidia.CUDABackend.make_cubin = lambda _, source, *more: self._assemble(source, more[-1])

    def collect(self, target: int) -> None:
        self.target = target
        limits.treat_others_as(divmod(target, 10))
        kernel_launches.launch_all(divmod(target, 10))

    def compile(self, launched: Launch) -> Compiled:
        self.target = launched.target
        found = launched.kernel.run(*launched.args, grid=(1,), warmup=True, **launched.constants)
        log = found.asm["cubin"].decode()
        used, spilled = (re.search(form, log) for form in (r"Used (\d+) registers", r"(\d+) bytes spill st"))
        assert used is not None and spilled is not None, log
        constants, facts = launched.constants, found.metadata
        sizes = [f"{name} {constants[name]}" for name in TILE_CONSTANTS if name in constants]
        return Compiled(
            launched.target,
            launched.model,
            launched.name,
            " × ".join(sizes).replace("_", " ").lower(),
            facts.num_warps,
            facts.num_stages,
            facts.shared,
            int(used[1]),
            int(spilled[1]),
            facts.tmem_size or 0,
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.target, 32)

    def get_current_device(self) -> int:
        return self.target

    def get_current_stream(self, device: int) -> int:
        return 0

    def _note(self, kernel: Any, grid: Any, args: Sequence[Any], constants: dict[str, Any], **_: Any) -> None:
        kept = tuple(_stand_in(value) for value in args)
        noted = Launch(self.target, kernel_launches.current_model, kernel, kept, constants)
        self.launches.setdefault(noted.key, noted)

    def _assemble(self, source: str, capability: int) -> bytes:
        """Assemble PTX. Returns the assembler's log about registers instead of a binary; Triton caches it."""
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(source)
            file.flush()
            command = [nvidia.get_ptxas(capability).path, "-v", "-o", os.devnull, file.name]
            command += [f"--gpu-name={nvidia.sm_arch_from_capability(capability)}"]
            ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode:
            raise RuntimeError(f"sm_{capability}: {ran.stderr[:2000]}")
        return ran.stderr.encode()


def _stand_in(value: Any) -> Any:
    """A small tensor of the same type and alignment, so that launches keep no weights in memory."""
    if not isinstance(value, Tensor):
        return value
    offset = 0 if value.data_ptr() % 16 == 0 else 1
    return torch.empty(16, dtype=value.dtype)[offset:]


def _type_name(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.dtype)
    return str(value.base.dtype) if hasattr(value, "block_shape") else type(value).__name__


def kernels_of_modules() -> set[str]:
    """Names of the kernels, without helpers, in the modules that `kernel_launches` imports."""
    kind = triton.runtime.jit.JITFunction
    return {
        name
        for module in vars(kernel_launches).values()
        if isinstance(module, ModuleType) and module.__name__.startswith("penstock.kernels.")
        for name, value in vars(module).items()
        if isinstance(value, kind) and name not in HELPERS
    }


def thinned(launches: Sequence[Launch]) -> list[Launch]:
    """Select each kernel once, and kernels with tiles once for each combination of argument types, with the
    targets in turn; also the largest tiles on the target with the least shared memory."""
    targets: dict[tuple[str, ...], list[Launch]] = {}
    for each in launches:
        found = targets.setdefault(each.types if each.name in TILED else (each.name,), [])
        if all(each.target != other.target for other in found):
            found.append(each)
    chosen = [found[number % len(found)] for number, found in enumerate(targets.values())]
    largest = sorted((each for each in launches if each.name in TIGHT), key=lambda each: each.tile_values)
    tight = {each.types: each for each in largest if each.target == TIGHTEST}
    known = {each.key for each in chosen}
    return chosen + [each for each in tight.values() if each.key not in known]


_recorder = Recorder()
_chosen: list[Launch] = []


def _compile_one(number: int) -> Compiled:
    return _recorder.compile(_chosen[number])


def compile_all(jobs: int) -> list[Compiled]:
    numbers = range(len(_chosen))
    if jobs == 1:
        return [_compile_one(number) for number in numbers]
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        return pool.map(_compile_one, numbers, chunksize=1)


def table(found: Sequence[Compiled]) -> str:
    """Format kernels with tiles: for each target, shared memory in KB, registers (spilled bytes), stages."""
    targets = [target for target in TARGETS if any(each.target == target for each in found)]
    rows: dict[tuple[str, str, str], dict[int, Compiled]] = {}
    for each in found:
        if each.kernel in TILED:
            row = rows.setdefault((each.kernel, each.model, f"{each.tile}, {each.warps} warps"), {})
            if each.target not in row or row[each.target].shared_bytes < each.shared_bytes:
                row[each.target] = each
    lines = ["| kernel | model | tile | " + " | ".join(f"sm_{target}" for target in targets) + " |"]
    lines.append("|---" * (3 + len(targets)) + "|")
    for (kernel, model, tile), row in sorted(rows.items()):
        cells = [_cell(row.get(target)) for target in targets]
        lines.append(f"| `{kernel.lstrip('_')}` | {model} | {tile} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(each: Compiled | None) -> str:
    if each is None:
        return "–"
    spilled = f" ({each.spilled_bytes})" if each.spilled_bytes else ""
    return f"{each.shared_bytes / 1024:.0f} KB, {each.registers}{spilled}, {each.stages}"


def summary(found: Sequence[Compiled]) -> str:
    lines = ["| target | GPUs | kernels compiled | shared memory, most | of | most spilled bytes a thread |"]
    lines.append("|---|---|---|---|---|---|")
    for target, names in TARGETS.items():
        own = [each for each in found if each.target == target]
        if own:
            most = max(each.shared_bytes for each in own) / 1024
            limit = limits.SHARED_BYTES[divmod(target, 10)] >> 10
            spilled = max(each.spilled_bytes for each in own)
            lines.append(f"| sm_{target} | {names} | {len(own)} | {most:.0f} KB | {limit} KB | {spilled} |")
    return "\n".join(lines)


PAGE = """# Kernels on other GPUs, by the compiler

Made by `make gpu-targets{args}` · Triton {triton} and its assemblers, without a GPU. Nothing here was timed.

Each kernel is compiled for each kind of GPU as a launch there would: with the shapes of published
models, the same tiles and the same specialization. It has to fit the shared memory of a program,
and a thread must not spill more than {spilled} bytes of registers.

{summary}

fp8 kernels exist from sm_89 on; on older GPUs fp8 weights are dequantised when they are loaded. The
Gluon kernel `gate_up` is for sm_90 alone; elsewhere the matrix library multiplies, and
`gated_activation` follows. Where shared memory is short, fewer tiles are loaded ahead
(`penstock/kernels/limits.py`).

Kernels with tiles follow. A cell has shared memory, registers of a thread (bytes spilled), and
stages.

{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every launch on every target")
    parser.add_argument("--targets", type=int, nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--only", default="", help="kernels whose name this regular expression finds")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--save", type=Path, help="write the table to this file")
    options = parser.parse_args()
    began = time.perf_counter()
    _recorder.install()
    for target in options.targets:
        _recorder.collect(target)
    launches = list(_recorder.launches.values())
    if missed := kernels_of_modules() - {each.name for each in launches}:
        raise SystemExit(f"kernels that nothing here launches: {', '.join(sorted(missed))}")
    launches = [each for each in launches if re.search(options.only, each.name)]
    _chosen[:] = launches if options.all else thinned(launches)
    found = compile_all(options.jobs)
    print(summary(found))
    print(f"{len(found)} kernels in {time.perf_counter() - began:.0f} s")
    if options.save is not None:
        args = f" ARGS=\"--only '{options.only}'\"" if options.only else ""
        parts = {"triton": triton.__version__, "spilled": MAX_SPILLED_BYTES, "args": args}
        options.save.write_text(PAGE.format(**parts, summary=summary(found), table=table(found)))
    if faults := [each.fault for each in found if each.fault is not None]:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
