"""How a dialect reports an error: the body's shape, and its own statuses where they differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.errors import ModelNotFound, NotPossible, PenstockError


def own_status(error: PenstockError) -> int:
    return error.status


@dataclass(frozen=True, slots=True)
class ErrorStyle:
    """The error answers of one dialect. `answer` is their type, for the OpenAPI schema."""

    body: Callable[[PenstockError], dict[str, Any]]
    status: Callable[[PenstockError], int] = own_status
    answer: Any = None


class OpenAIErrorDetail(msgspec.Struct, kw_only=True):
    message: str
    type: str  # such as BadRequestError: the name of the `openai` package's exception
    param: str | None
    code: int  # the status
    reason: str  # such as queue_full: finer than the status


class OpenAIError(msgspec.Struct, kw_only=True):
    """An error as OpenAI's and vLLM's clients read it."""

    error: OpenAIErrorDetail


_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    408: "APITimeoutError",
    409: "ConflictError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


def openai_error_body(error: PenstockError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": _TYPES.get(
                error.status, "BadRequestError" if error.status < 500 else "InternalServerError"
            ),
            "param": error.param,
            "code": error.status,
            "reason": error.code,
        }
    }


OPENAI_ERRORS = ErrorStyle(openai_error_body, answer=OpenAIError)


# --- styles that several dialects share ---------------------------------------------------------------------

_REMEDY = "set truncate_prompt_tokens to -1"  # the remedy in messages about long texts


def in_own_names(error: PenstockError, own_names: Mapping[str, str]) -> str:
    """The message, with a dialect's own name for the field that it is about."""
    own_name = own_names.get(error.param or "")
    return error.message if own_name is None else re.sub(rf"\b{error.param}\b", own_name, error.message)


def with_remedy(message: str, remedy: str) -> str:
    """The message, with the remedy for long texts in a dialect's own words."""
    return message.replace(_REMEDY, remedy)


class DetailError(msgspec.Struct, kw_only=True):
    """An error as clients of Jina and Voyage read it."""

    detail: str


def status_400(error: PenstockError) -> int:
    """400 for an unknown model and for one that cannot do the task, in dialects without 404 and 422."""
    return 400 if isinstance(error, ModelNotFound | NotPossible) else error.status


def detail_errors(remedy: str, own_names: Mapping[str, str] | None = None) -> ErrorStyle:
    """The errors of Jina and Voyage. `remedy` is for texts that are too long."""

    def body(error: PenstockError) -> dict[str, Any]:
        return {"detail": with_remedy(in_own_names(error, own_names or {}), remedy)}

    return ErrorStyle(body, status_400, DetailError)
