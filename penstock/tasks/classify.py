"""Classification of texts and of their tokens."""

from __future__ import annotations

from penstock.outputs.tokens import token_rows
from penstock.tasks.model import TextModel
from penstock.tasks.rows import ListTask, MatrixTask
from penstock.types import Array, PooledOutput, Request


class Classify(MatrixTask):
    """The probability of each label for each text, [texts, labels]."""


class TokenClassify(ListTask[Array]):
    """The probability of each label for each token: for each text a matrix [tokens, labels]."""

    def finish(self, model: TextModel, request: Request, output: PooledOutput) -> list[Array]:
        return token_rows(request, output.values)
