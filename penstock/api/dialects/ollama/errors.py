"""The errors of Ollama's dialect."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.api.error_styles import ErrorStyle, with_remedy
from penstock.errors import ModelNotFound, NotPossible, PenstockError


class OllamaError(msgspec.Struct, kw_only=True):
    """An error as Ollama's clients read it."""

    error: str


def _ollama_body(error: PenstockError) -> dict[str, Any]:
    message = with_remedy(error.message, "use /api/embed with truncate: true")
    return {"error": f"model not found: {message}" if isinstance(error, ModelNotFound) else message}


def _ollama_status(error: PenstockError) -> int:
    return 400 if isinstance(error, NotPossible) else error.status


OLLAMA_ERRORS = ErrorStyle(_ollama_body, _ollama_status, OllamaError)
