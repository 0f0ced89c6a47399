from __future__ import annotations

import gc
import weakref

import pytest
import torch

from penstock import Engine
from penstock.errors import DeviceFailed, DeviceOutOfMemory, RowFailed
from penstock.runner.faults import diagnose, typed_faults
from penstock.runner.model_runner import ModelRunner
from penstock.types import StepPlan, StepResult

ILLEGAL = "CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`"


def dead() -> None:
    raise RuntimeError(ILLEGAL)


def alive() -> None:
    return None


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError(),
    ],
)
def test_every_out_of_memory_error_is_recognised(error: Exception) -> None:
    assert isinstance(diagnose(error, dead), DeviceOutOfMemory)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(ILLEGAL),
        RuntimeError(ILLEGAL),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ],
)
def test_a_device_that_no_longer_answers_has_failed(error: Exception) -> None:
    found = diagnose(error, dead)
    assert isinstance(found, DeviceFailed)
    assert found.message.startswith("the device failed: ") and "\n" not in found.message
    assert diagnose(error, alive) is None, "a device that goes on leaves the fault to the step"


def test_other_errors_are_faults_of_the_step() -> None:
    assert diagnose(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), dead) is None
    with pytest.raises(RuntimeError, match="shapes"), typed_faults(torch.device("cpu")):
        raise RuntimeError("shapes")


def test_the_tensors_of_a_step_that_ran_out_of_memory_are_freed() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        activations = torch.ones(16)
        kept.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(DeviceOutOfMemory) as caught, typed_faults(torch.device("cpu")):
        step()
    gc.collect()
    assert kept[0]() is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_runner_translates_the_faults_of_its_steps() -> None:
    with Engine(device="cpu") as engine:
        runner = engine.local.engine.core.runner
        assert isinstance(runner, ModelRunner)

        def full(plan: StepPlan) -> StepResult:
            raise torch.OutOfMemoryError("CUDA out of memory")

        runner._run_on_cpu = full  # type: ignore[method-assign]
        with pytest.raises(RowFailed, match="more memory than the device has: CUDA out of memory"):
            engine.embed(["one", "two and three"])
