from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.bench.kernels.cases import Case, Place, mixed_lengths
from penstock.bench.kernels.host import TOKENS, WIDTH, pooling_all, step_all
from penstock.bench.kernels.registry import KERNELS
from penstock.bench.kernels.run import Floor
from penstock.cli.main import app
from penstock.pooling.methods import METHODS
from tests.command_line import CliRunner

PLACE = Place(torch.device("cpu"), torch.float32)
TOLERANCE = {"linear_int8": 0.05}


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_agrees_with_its_reference(name: str) -> None:
    with torch.inference_mode():
        for case in KERNELS[name](PLACE):
            got, wanted = case.run().float(), case.reference().float()
            assert got.shape == wanted.shape
            error = (got - wanted).abs().max() / wanted.abs().max()
            assert error < TOLERANCE.get(name, 1e-4), f"{case.kernel} at {case.shape}"


def test_every_pooling_method_is_measured() -> None:
    assert {case.kernel for case in KERNELS["pooling"](PLACE)} == {f"pooling {name}" for name in METHODS}


def test_the_host_s_work_for_all_tokens_is_reported_with_its_growth(tmp_path: Path) -> None:
    file = tmp_path / "k.json"
    args = ["bench", "kernels", "--device", "cpu", "--only", "pooling_all", "step_all", "--min-time", "0"]
    result = CliRunner().invoke(app, [*args, "--output-json", str(file)])
    assert result.exit_code == 0, result.output
    assert "host µs" in result.stdout and "growth" in result.stdout
    rows = json.loads(file.read_text())["host"]
    assert [(row["kernel"], row["rows"]) for row in rows] == [
        (kernel, count) for kernel in ("pooling all", "step all") for count in (1, 64, 1024)
    ]
    assert all(row["host_us"] > 0 and row["growth"] > 0 for row in rows)
    assert rows[0]["growth"] == rows[3]["growth"] == 1


def test_host_cases_do_what_the_product_does() -> None:
    for case in pooling_all():
        rows: Any = case.run()
        assert [row.shape for row in rows] == [(TOKENS, WIDTH)] * case.rows
        assert rows[0].base is not None, "a view, not a copy"
    for case in step_all():
        given: Any = case.run()
        assert [row.shape for _, (rows,) in given for row in rows] == [(TOKENS, WIDTH)] * case.rows


def test_the_floor_is_the_longer_of_bytes_and_operations() -> None:
    floor = Floor(PLACE, 0.0)

    def case(moved_bytes: int, flops: int) -> Case:
        return Case("k", "s", lambda: torch.zeros(1), lambda: torch.zeros(1), moved_bytes, flops)

    assert floor.seconds(case(1 << 20, 0)) == pytest.approx((1 << 20) / floor.bytes_per_s(1 << 20))
    assert floor.seconds(case(0, 10**12)) == pytest.approx(10**12 / floor.flops_per_s())


def test_lengths_are_like_those_of_texts() -> None:
    lengths = mixed_lengths(1024)
    assert sum(lengths) >= 1024
    assert min(lengths) >= 4
    assert lengths == mixed_lengths(1024)


def test_the_command_prints_and_saves(tmp_path: Path) -> None:
    file = tmp_path / "k.json"
    args = ["bench", "kernels", "--device", "cpu", "--only", "pooling", "linear", "--min-time", "0"]
    result = CliRunner().invoke(app, [*args, "--output-json", str(file)])
    assert result.exit_code == 0, result.output
    assert "pooling mean" in result.stdout
    assert len(json.loads(file.read_text())["kernels"]) >= 2 * len(METHODS) + 2


@pytest.mark.parametrize(
    ("flag", "value"), [("--only", "nothing"), ("--dtype", "int3"), ("--device", "cuda:7")]
)
def test_what_cannot_be_measured_is_refused(flag: str, value: str) -> None:
    if flag == "--device" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    result = CliRunner().invoke(app, ["bench", "kernels", "--device", "cpu", "--min-time", "0", flag, value])
    assert result.exit_code == 2
    assert value in result.stderr
