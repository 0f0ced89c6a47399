"""A task with a LoRA adapter: every row of its requests carries the adapter's id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from penstock.tasks.model import TextModel
from penstock.tasks.run import PoolingTask, Prepared

R = TypeVar("R")


@dataclass(frozen=True, slots=True, eq=False)
class Adapted(Generic[R]):
    """Any pooling task, with the adapter of this id. The id is resolved before anything is tokenised, so all
    windows of a large call use the same weights."""

    task: PoolingTask[R]
    adapter: int

    @property
    def num_rows(self) -> int:
        return self.task.num_rows

    def check(self, model: TextModel) -> None:
        self.task.check(model.with_lora)

    async def prepare(self, model: TextModel, request_id: str) -> Prepared[R]:
        prepared = await self.task.prepare(model.with_lora, request_id)
        request = prepared.request
        request.adapters = np.full(request.num_rows, self.adapter, dtype=np.int32)
        return prepared

    def windows(self, size: int) -> Iterator[PoolingTask[R]]:
        return (Adapted(window, self.adapter) for window in self.task.windows(size))

    def merge(self, parts: Sequence[R]) -> R:
        return self.task.merge(parts)
