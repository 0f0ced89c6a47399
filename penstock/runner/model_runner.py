"""Where plan, model and pooler meet: plan → launch → collect.

On a CPU a step runs on the runner's own thread. On CUDA it is enqueued by the caller and a second
thread waits for its event, so the engine loop never blocks on a device.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from penstock.core import StepPlan, StepResult
from penstock.layers.batch import Batch
from penstock.models.registry import Model
from penstock.pooling.build import Pooler
from penstock.runner.staging import Staging


class ModelRunner:
    def __init__(self, model: Model, pooler: Pooler, device: torch.device, depth: int) -> None:
        self.model = model
        self.pooler = pooler
        self.device = device
        self.staging = Staging(device, depth)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-step")

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        if self.device.type == "cpu":
            return self._thread.submit(self._run_on_cpu, plan)
        return self._launch_on_cuda(plan)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> list[Tensor]:
        """The whole step on the device: one tensor for each variant of the plan."""
        batch, index = self._prepare(plan)
        hidden = self.model(batch)
        return self.pooler(hidden, batch, plan.variants, index)

    def _prepare(self, plan: StepPlan) -> tuple[Batch, list[Tensor | None]]:
        """All integers of the plan, sent at once."""
        sent = self.staging.send(
            {
                "token_ids": plan.token_ids,
                "positions": plan.positions,
                "type_ids": plan.type_ids,
                "cu_lengths": plan.cu_lengths,
                "lengths": plan.lengths,
                "skip": plan.skip,
                **{
                    f"variant{i}": v.rows if v.tokens is None else v.tokens
                    for i, v in enumerate(plan.variants)
                },
            }
        )
        batch = Batch(
            token_ids=sent["token_ids"],
            positions=sent["positions"],
            type_ids=sent.get("type_ids"),
            cu_lengths=sent["cu_lengths"],
            lengths=sent["lengths"],
            skip=sent.get("skip"),
            groups=plan.groups,
            max_length=plan.max_length,
            num_tokens=plan.num_tokens,
            num_rows=plan.num_rows,
        )
        return batch, [sent.get(f"variant{i}") for i in range(len(plan.variants))]

    def _run_on_cpu(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        outputs = self.staging.fetch(self.forward(plan))
        return StepResult(tuple(outputs), time.perf_counter() - began)

    def _launch_on_cuda(self, plan: StepPlan) -> Future[StepResult]:
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        outputs = self.staging.fetch(self.forward(plan))
        end.record()

        def collect() -> StepResult:
            end.synchronize()
            return StepResult(tuple(outputs), begin.elapsed_time(end) / 1000)

        return self._thread.submit(collect)
