"""Rank 0 of a tensor-parallel model. It runs steps like any other runner, and sends them to the other ranks.

If a step fails while ranks compute together, they are out of step with one another, so the engine ends
(`DeviceFailed`). Pooling and sampling run only on rank 0, and may fail as on one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from penstock.errors import DeviceFailed
from penstock.kvcache.store import KVCache
from penstock.layers.adapter_state import StepAdapters
from penstock.layers.batch import Batch
from penstock.layers.head import TaskHead
from penstock.models.registry import Model
from penstock.pooling.build import Pooler
from penstock.runner.generator import GeneratedTensors, Generator, SampleTensors
from penstock.runner.inputs import AdapterPlan
from penstock.runner.model_runner import ModelRunner
from penstock.runner.parallel.adapters import ParallelAdapterPool
from penstock.runner.parallel.group import RankGroup
from penstock.runner.parallel.plans import StepSlots, encode_step
from penstock.runner.parallel.processes import Ranks
from penstock.sampling.sampler import VerifyTensors
from penstock.types import GeneratePlan, PoolPlan, SamplePlan


class _OwnFailure(Exception):
    """A failure of rank 0 only. The other ranks have finished the step."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class ParallelGenerator(Generator):
    """Samples tokens on rank 0, and broadcasts their ids to all ranks."""

    def __init__(self, head: TaskHead, slots: int, group: RankGroup) -> None:
        super().__init__(head, slots, group.device)
        self._group = group

    def __call__(
        self,
        hidden: Tensor,
        sample: SamplePlan,
        tensors: SampleTensors,
        adapters: StepAdapters | None = None,
    ) -> GeneratedTensors:
        try:
            return super().__call__(hidden, sample, tensors, adapters)
        except _OwnFailure as failure:
            if tensors.prompts is None:
                raise
            raise failure.error from failure  # other ranks wait for rank 0 to compute prompt logits

    def choose(
        self, logits: Tensor, sample: SamplePlan, slots: Tensor, verify: VerifyTensors | None = None
    ) -> GeneratedTensors:
        try:
            generated = super().choose(logits, sample, slots, verify)
        except Exception as error:
            self._group.broadcast(torch.zeros_like(slots))  # other ranks wait for it
            raise _OwnFailure(error) from error
        self._group.broadcast(generated.token_ids)
        return generated


class ParallelRunner(ModelRunner):
    def __init__(
        self,
        model: Model,
        pooler: Pooler,
        depth: int,
        group: RankGroup,
        ranks: Ranks,
        cache: KVCache | None,
        generator: ParallelGenerator | None,
    ) -> None:
        super().__init__(model, pooler, group.device, depth, cache, generator)
        self._group = group
        self._ranks = ranks
        self._is_together = False  # whether other ranks are computing the current step
        self.background = None  # no interruptions: all ranks run steps in the same order
        self.adapters: ParallelAdapterPool | None = None

    def forward(self, plan: PoolPlan, adapters: AdapterPlan | None = None) -> list[Tensor]:
        with self._whole_steps():
            adapters = adapters or self._adapter_plan(plan)
            if self.runs_model(plan):
                self._send(plan, adapters)
            return super().forward(plan, adapters)

    def _hidden(self, batch: Batch) -> Tensor:
        hidden = super()._hidden(batch)
        self._is_together = batch.is_generation  # generation also computes logits together
        return hidden

    def generate(self, plan: GeneratePlan, adapters: AdapterPlan | None = None) -> GeneratedTensors:
        plan = self._with_slots_updated(plan)
        with self._whole_steps():
            adapters = adapters or self._adapter_plan(plan)
            self._send(plan, adapters)
            generated = super().generate(plan, adapters)
            self._is_together = False
            return generated

    def _with_slots_updated(self, plan: GeneratePlan) -> GeneratePlan:
        """Update the slots before the step is sent to other ranks, because the update may fail."""
        sample = plan.sample
        if self.generator is None or not (sample.leaves or sample.joins or sample.masks):
            return plan
        self.generator.update_slots(sample)
        return replace(plan, sample=replace(sample, leaves=(), joins=(), masks=()))

    def _send(self, plan: PoolPlan | GeneratePlan, adapters: AdapterPlan | None) -> None:
        outputs = self._output_plan(plan) if isinstance(plan, PoolPlan) else None
        slots = None if adapters is None else StepSlots(adapters.rank, adapters.row_slots)
        orders = None if self.adapters is None else self.adapters.take_orders()
        message = encode_step(plan, outputs, slots, orders)
        self._is_together = True
        self._ranks.send(message)

    @contextmanager
    def _whole_steps(self) -> Iterator[None]:
        """Turn an error while ranks compute together into `DeviceFailed`, which ends the engine."""
        self._is_together = False
        try:
            yield
        except _OwnFailure as failure:
            raise failure.error from None
        except DeviceFailed:
            raise
        except Exception as error:
            if not self._is_together:
                raise
            self._ranks.check()  # the cause may be a lost rank
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DeviceFailed(f"a step failed on rank 0 of {self._group.size}: {first_line}") from error

    def close(self) -> None:
        if self._ranks.failure is not None:
            self._group.close()  # so that no collective waits for a lost rank
        super().close()
        self._ranks.stop()
        self._group.close()
        self._ranks.close()
