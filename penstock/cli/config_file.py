"""`--config FILE`: flags of `penstock serve` in a YAML file. The command line takes precedence."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

FLAG = "--config"
MODELS = "models"  # the key that lists models
RAY = "ray"  # the key with settings for `--ray`
Convert = Callable[[Any], tuple[str, Any]]  # value in the file → (field, field's value)


def config_file(args: Sequence[str]) -> str | None:
    """The file that the command line names; None if there is none."""
    found = None
    for arg, following in zip(args, [*args[1:], None], strict=True):
        if arg == "--":
            break
        if arg == FLAG:
            found = following
        elif arg.startswith(f"{FLAG}="):
            found = arg.removeprefix(f"{FLAG}=")
    return found


def read_config(file: str, params: Sequence[Any]) -> dict[str, Any]:
    """The file's flags as values of the parser's parameters."""
    by_name = {name: param for param in params for name in (*param.opts, *param.secondary_opts)}
    values: dict[str, Any] = {}
    for key, value in read_mapping(file).items():
        if key == MODELS or (key == RAY and isinstance(value, dict)):
            continue
        name = "--" + str(key).replace("_", "-")
        param = by_name.get(name)
        if param is None or name in (FLAG, "--help"):
            close = get_close_matches(name, by_name, 1)
            hint = f"; did you mean {close[0].lstrip('-')}?" if close else ""
            raise ConfigError(
                f"{FLAG} {file} has {key!r}, which is no flag of this command{hint}", param=FLAG
            )
        if value is not None:
            values[param.name] = _value(param, name, value)
    return values


def listed_models(file: str, settings: Mapping[str, Convert]) -> list[dict[str, Any]]:
    """The models that a file lists, each as a mapping of configuration fields.

    `settings` maps each flag that a model may set, without its leading hyphens, to the function that converts
    a value of the file.
    """
    return models_in(read_mapping(file), settings)


def models_in(content: Mapping[Any, Any], settings: Mapping[str, Convert]) -> list[dict[str, Any]]:
    """The models that the content of a file lists; see `listed_models`."""
    listed = content.get(MODELS)
    if listed is None:
        return []
    if not isinstance(listed, list) or not listed:
        raise ConfigError(
            f"{MODELS} of {FLAG} must be a list, as in - model: BAAI/bge-small-en-v1.5", param=FLAG
        )
    return [_listed_model(entry, settings) for entry in listed]


def _listed_model(entry: Any, settings: Mapping[str, Convert]) -> dict[str, Any]:
    given = {"model": entry} if isinstance(entry, str) else entry
    if not isinstance(given, dict) or not isinstance(given.get("model"), str):
        raise ConfigError(
            f"{MODELS} of {FLAG} has {entry!r}; use a model, or a mapping with its `model` and settings",
            param=FLAG,
        )
    fields: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("_", "-")
        if name not in settings:
            close = get_close_matches(name, settings, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"model {given['model']!r} of {FLAG} has {key!r}, which is no setting of a model{hint}",
                param=FLAG,
            )
        if value is not None:
            field, converted = settings[name](value)
            fields[field] = converted
    return fields


def read_mapping(file: str) -> Mapping[Any, Any]:
    """The mapping in a YAML file; empty if the file is empty."""
    import yaml

    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{FLAG} {file!r} cannot be read: {reason}", param=FLAG) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{FLAG} {file!r} is not valid YAML: {error}", param=FLAG) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{FLAG} {file!r} must map names of flags to values, as in port: 8080", param=FLAG)
    return content


def _value(param: Any, name: str, value: Any) -> Any:
    if getattr(param, "is_flag", False):
        if not isinstance(value, bool):
            raise ConfigError(f"{name[2:]} is {value!r} in {FLAG}; use true or false", param=FLAG)
        return value is not (name in param.secondary_opts)
    if getattr(param, "multiple", False):
        return [_text(each) for each in (value if isinstance(value, list) else [value])]
    return _text(value)


def _text(value: Any) -> str:
    """A value as it would be written on the command line."""
    return value if isinstance(value, str) else json.dumps(value)
