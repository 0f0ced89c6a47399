"""Every thread that launches kernels uses the runner's GPU."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
import torch

from penstock.runner import model_runner
from penstock.runner.cuda_device import use_device
from penstock.runner.model_runner import ModelRunner


def test_a_numbered_gpu_is_set_for_the_thread_and_others_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("cpu", "cuda", "cuda:1"):
        use_device(torch.device(name))
    assert chosen == [torch.device("cuda:1")]


def test_each_thread_that_launches_steps_uses_the_gpu_of_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    users: list[int] = []
    monkeypatch.setattr(model_runner, "use_device", lambda device: users.append(threading.get_ident()))
    runner = object.__new__(ModelRunner)
    runner.device, runner._launching_thread, runner.graph_history = torch.device("cuda:1"), 0, None
    monkeypatch.setattr(ModelRunner, "_launch_on_cuda", lambda self, plan: Future())

    def launch_twice() -> None:
        runner.launch(None)  # type: ignore[arg-type]
        runner.launch(None)  # type: ignore[arg-type]

    launch_twice()
    other = threading.Thread(target=launch_twice)
    other.start()
    other.join()
    assert len(users) == 2 and users[0] == threading.get_ident() != users[1]
