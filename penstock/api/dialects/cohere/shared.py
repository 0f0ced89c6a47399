"""What the routes of Cohere's dialect share: errors, long texts, and `meta` in answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import msgspec

from penstock.api.error_styles import ErrorStyle, in_own_names
from penstock.errors import BadValue, PenstockError
from penstock.inputs.processor import InputOptions

Truncate = Literal["NONE", "START", "END"]


def truncating(truncate: Truncate, limit: int) -> InputOptions:
    if truncate == "NONE":
        return InputOptions()
    side: Literal["left", "right"] = "left" if truncate == "START" else "right"
    return InputOptions(truncate_prompt_tokens=limit, truncation_side=side)


def refusing_longer(limit: int, name: str) -> Callable[[list[int]], None]:
    """The check for `truncate: NONE`: refuse rows with more tokens than the limit."""

    def check(lengths: list[int]) -> None:
        index = next((at for at, length in enumerate(lengths) if length > limit), None)
        if index is not None:
            raise BadValue(
                f"{name} {index} has more than {limit} tokens; shorten it, or set truncate to END or START",
                param=name,
            )

    return check


def meta(version: str, **billed_units: int) -> dict[str, Any]:
    return {"api_version": {"version": version}, "billed_units": billed_units}


class ApiVersion(msgspec.Struct, kw_only=True):
    version: Literal["1", "2"]


class BilledUnits(msgspec.Struct, kw_only=True, omit_defaults=True):
    images: int | msgspec.UnsetType = msgspec.UNSET
    input_tokens: int | msgspec.UnsetType = msgspec.UNSET
    image_tokens: int | msgspec.UnsetType = msgspec.UNSET
    search_units: int | msgspec.UnsetType = msgspec.UNSET
    classifications: int | msgspec.UnsetType = msgspec.UNSET


class InputTokens(msgspec.Struct, kw_only=True):
    input_tokens: int


class CohereMeta(msgspec.Struct, kw_only=True, omit_defaults=True):
    api_version: ApiVersion
    billed_units: BilledUnits | msgspec.UnsetType = msgspec.UNSET
    tokens: InputTokens | msgspec.UnsetType = msgspec.UNSET


class CohereError(msgspec.Struct, kw_only=True):
    """An error as Cohere's clients read it."""

    message: str


def cohere_errors(own_names: Mapping[str, str] | None = None) -> ErrorStyle:
    """Cohere's errors. `own_names` maps common names of fields to Cohere's names."""
    return ErrorStyle(partial(_cohere_body, own_names or {}), answer=CohereError)


def _cohere_body(own_names: Mapping[str, str], error: PenstockError) -> dict[str, Any]:
    return {"message": in_own_names(error, own_names)}
