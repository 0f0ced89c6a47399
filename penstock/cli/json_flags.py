"""Flags that set one key of a JSON object, as in vLLM's command line: --pooler-config.task embed."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from penstock.errors import ConfigError


def with_json_keys(args: list[str], flags: Collection[str]) -> list[str]:
    """Join `--pooler-config.task embed` and `--pooler-config '{…}'` into one flag with a JSON object."""
    out: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(args)
    for arg in rest:
        name, equals, value = arg.partition("=")
        flag, dot, key = name.partition(".")
        flag = flag.replace("_", "-") if dot else flag
        if flag not in flags or (not dot and not _has_keys(args, flag)):
            out.append(arg)
            continue
        given = value if equals else next(rest, None)
        if given is None:
            raise ConfigError(f"{name} needs a value", param=flag)
        target = objects.setdefault(flag, {})
        if dot:
            _put(target, key.split("."), _value(given))
        else:
            target.update(_object(flag, given))
    return out + [part for flag, value in objects.items() for part in (flag, json.dumps(value))]


def _has_keys(args: list[str], flag: str) -> bool:
    return any(arg.replace("_", "-").startswith(f"{flag}.") for arg in args)


def _put(target: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        inner = target.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{key} has a value already; it cannot have keys too", param=key)
        target = inner
    target[keys[-1]] = value


def _value(text: str) -> Any:
    """A JSON value, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _object(flag: str, text: str) -> dict[str, Any]:
    value = _value(text)
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} takes a JSON object, not {text}", param=flag)
    return value
