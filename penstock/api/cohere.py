"""What the routes of Cohere's dialect share: long texts, and `meta` in answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from penstock.errors import BadValue
from penstock.inputs.processor import InputOptions

Truncate = Literal["NONE", "START", "END"]


def truncating(truncate: Truncate, limit: int) -> InputOptions:
    if truncate == "NONE":
        return InputOptions()
    side: Literal["left", "right"] = "left" if truncate == "START" else "right"
    return InputOptions(truncate_prompt_tokens=limit, truncation_side=side)


def refusing_longer(limit: int, name: str) -> Callable[[list[int]], None]:
    """What `truncate: NONE` does: refuse rows of more tokens than the limit."""

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
