"""Embeddings in several number formats at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from penstock.tasks.model import TextModel
from penstock.tasks.multi_task import want_more_outputs
from penstock.tasks.rows import Matrix, RowTask
from penstock.types import OutputDtype, PooledOutput, Request

Columns = dict[OutputDtype, Matrix]


@dataclass(kw_only=True, eq=False)
class EmbedInTypes(RowTask[Columns]):
    """One vector for each text in each of `dtypes`, from one forward pass. `params` gets the first dtype."""

    dtypes: Sequence[OutputDtype]

    def __post_init__(self) -> None:
        self.params = msgspec.structs.replace(self.params, dtype=self.dtypes[0])

    def is_slow_to_finish(self, request: Request) -> bool:
        return False

    async def request(self, model: TextModel, request_id: str) -> Request:
        request = await super().request(model, request_id)
        more = [msgspec.structs.replace(self.params, dtype=dtype) for dtype in self.dtypes[1:]]
        want_more_outputs(model, request, more)
        return request

    def finish(self, model: TextModel, request: Request, output: PooledOutput) -> Columns:
        return dict(zip(self.dtypes, (output.values, *output.extra_values), strict=True))

    def merge(self, parts: Sequence[Columns]) -> Columns:
        return {dtype: np.concatenate([part[dtype] for part in parts]) for dtype in self.dtypes}
