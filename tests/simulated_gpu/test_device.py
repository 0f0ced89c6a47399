"""The simulated device refuses what a real one refuses. Its graphs repeat only what was captured."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tests.simulated_gpu.tensors import DEVICE


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def numbers(*sizes: int) -> Tensor:
    return torch.arange(float(torch.Size(sizes).numel()), device="cuda").view(sizes)


def test_tensors_say_where_they_are_and_compute_as_on_the_host() -> None:
    x = numbers(3, 4)
    assert x.is_cuda and x.device == DEVICE and not x.cpu().is_cuda
    assert torch.equal((x @ x.T)[1:].cpu(), (x.cpu() @ x.cpu().T)[1:])
    x[1] = 7
    x[:, 0].add_(1)
    assert x.cpu().tolist() == [[1, 1, 2, 3], [8, 7, 7, 7], [9, 9, 10, 11]]


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(4),
        lambda x: torch.cat([x, torch.ones(3, 4)]),
        lambda x: torch.ones(3)[x[0].long()],
        lambda x: torch.nn.functional.embedding(torch.arange(2), x),
    ],
    ids=["sum", "cat", "index", "embedding"],
)
def test_operands_on_two_devices_are_refused(mix: object) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        mix(numbers(3, 4))  # type: ignore[operator]


def test_threads_make_tensors_on_the_device_too() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: torch.zeros(2, device="cuda").is_cuda).result()


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x[0, 0] > 0),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 3],
        lambda x: x[torch.arange(2)],
        lambda x: x.copy_(torch.ones(3, 4)),
        lambda x: torch.tensor([1.0], device="cuda"),
        lambda x: torch.cuda.synchronize(),
    ],
)
def test_waits_are_found_where_they_are_forbidden(ask: object) -> None:
    x = numbers(3, 4)
    ask(x)  # type: ignore[operator]
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.ones(3, 4).to("cuda", non_blocking=True)
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            ask(x)  # type: ignore[operator]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(work: object) -> tuple[torch.cuda.CUDAGraph, object]:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        return graph, work()  # type: ignore[operator]
    finally:
        graph.capture_end()


def test_a_graph_repeats_operations_on_the_same_memory() -> None:
    x, out, runs = numbers(2, 3), torch.zeros(3, device="cuda"), []

    def work() -> Tensor:
        runs.append(1)
        twice = (x * 2).t()[1:]
        out.copy_(x.sum(0))
        twice[0, 0] = 50
        return twice

    graph, result = captured(work)
    assert isinstance(result, Tensor)
    x.fill_(1)
    graph.replay()
    assert result.tolist() == [[50, 2], [2, 2]] and out.tolist() == [2, 2, 2] and len(runs) == 1


def test_a_graph_does_not_see_what_python_changes() -> None:
    factor = [2.0]
    x = numbers(2)
    graph, result = captured(lambda: x * factor[0])
    factor[0] = 3.0
    graph.replay()
    assert isinstance(result, Tensor) and result.tolist() == [0, 2]


def test_a_graph_keeps_no_memory_from_before_its_capture() -> None:
    memory = [numbers(4)]
    graph, _ = captured(lambda: memory[0] + 1)
    graph.replay()
    memory.clear()
    with pytest.raises(RuntimeError, match="memory that was freed"):
        graph.replay()


def test_a_capture_refuses_to_wait() -> None:
    x = numbers(4)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        captured(lambda: x.sum().item())
