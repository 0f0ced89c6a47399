"""Token embeddings: one vector for each token, as late-interaction models compare them."""

from __future__ import annotations

from penstock.outputs.tokens import token_rows
from penstock.tasks.model import TextModel
from penstock.tasks.rows import ListTask
from penstock.types import Array, PooledOutput, Request


class TokenEmbed(ListTask[Array]):
    """For each text a matrix [tokens, dimensions], special tokens included."""

    def finish(self, model: TextModel, request: Request, output: PooledOutput) -> list[Array]:
        return token_rows(request, output.values)
