"""Labels that come with a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.errors import BadValue, shown
from penstock.inputs.labelled import LabelledOptions
from penstock.inputs.processor import InputOptions

_NO_MEANING = ("prompt_name", "prompt", "instruction", "input_type", "adapter")


def row_options(options: InputOptions, max_request_tokens: int | None = None) -> LabelledOptions:
    """The options of rows that hold labels and a text. Options that do not apply to them are refused."""
    for name in _NO_MEANING:
        if getattr(options, name) is not None:
            raise BadValue(f"{name} does not apply to rows with labels; leave it out", param=name)
    if not options.add_special_tokens or options.truncation_side != "right":
        name = "truncation_side" if options.add_special_tokens else "add_special_tokens"
        raise BadValue(f"{name} cannot be changed for rows with labels; leave it out", param=name)
    return LabelledOptions(options.truncate_prompt_tokens, options.cache_salt, max_request_tokens)


def check_labels(labels: Any, max_labels: int) -> None:
    if isinstance(labels, str) or not isinstance(labels, Sequence) or not labels:
        raise BadValue("labels is empty; give a list with at least one label", param="labels")
    if len(labels) > max_labels:
        raise BadValue(f"labels has {len(labels)} labels; use at most {max_labels}", param="labels")
    seen: set[str] = set()
    for index, label in enumerate(labels):
        if not isinstance(label, str) or not label.strip():
            raise BadValue(f"labels {index} is not a text with at least one character", param="labels")
        if label in seen:
            raise BadValue(f"labels {index} is given twice: {shown(label)}", param="labels")
        seen.add(label)
