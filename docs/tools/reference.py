"""Render the generated parts of the reference pages. Each replaces a `<!-- generated: NAME -->`."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
import typing
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
import msgspec.inspect

from docs.tools.source import Field, fields_of, signature
from penstock.api import meanings
from penstock.api.fields import NoEffect, Refused

METRIC_MODULES = (
    "penstock.api.cache_metrics",
    "penstock.api.metrics",
    "penstock.serving.engine_metrics",
    "penstock.serving.process_metrics",
)

GPU_RATE_MODELS = ("bge-base", "xlmr-large", "qwen3-embed-0.6b", "qwen3-4b", "qwen3-8b")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head)]
    lines.append(["---"] * len(lines[0]))
    lines += [[_cell(text) for text in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _cell(text: str) -> str:
    """A table cell: one line, with `|` escaped outside code spans. Inside them no escape is needed."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part if part.startswith("`") else part.replace("|", "\\|") for part in parts)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


# --- HTTP ---------------------------------------------------------------------------------------------------


def meaning(body: str, field: str) -> str:
    """The description of a field. The build fails if the package has none."""
    found = meanings.meaning(body, field)
    if found is None:
        raise KeyError(f"penstock/api/fields.toml says nothing about field {field!r} of {body}")
    return found


def http() -> str:
    """Every route, grouped as in /docs, with the fields of its body."""
    from penstock.api.app import ROUTES

    groups: dict[str, list[str]] = {}
    shown: set[type] = set()
    for route in ROUTES:
        if not route.is_listed:
            continue
        part = groups.setdefault(route.dialect, [])
        method = route.all_methods[0]
        part.append(f"#### `{method} {route.path}`\n\n{first_line(route.handler)}\n")
        bodies = [] if route.body is None else [route.body, *(each.body for each in route.variants)]
        bodies += [each for each in (route.form, route.query) if each is not None]
        for body in bodies:
            if body in shown:
                part.append(f"The body is the same `{body.__name__}` as above.\n")
                continue
            shown.add(body)
            note = inspect.getdoc(body) or ""
            part.append(f"`{body.__name__}`: {note}\n\n{_body(body, body.__name__)}")
    return "\n".join(
        f"### {group[0].upper()}{group[1:]}\n\n" + "\n".join(parts) for group, parts in groups.items()
    )


def _body(body: type, described_as: str) -> str:
    rows = [
        (
            _code(field.name),
            _code(as_json(field.type)),
            as_json(_shown_default(field)),
            meaning(described_as, field.name),
        )
        for field in fields_of(body)
    ]
    return table(("field", "type", "default", "meaning"), rows)


def dialects() -> str:
    """Every dialect: its routes, and whether each field of their bodies has an effect."""
    from penstock.api.app import ROUTES
    from penstock.api.schema import DIALECTS, TITLES, kinds_of

    kinds = [(route, kind) for route in ROUTES if route.is_listed for kind in kinds_of(route)]
    used = dict.fromkeys(kind.dialect for _, kind in kinds)
    names = [name for name in DIALECTS if name in used] + [name for name in used if name not in DIALECTS]
    parts = []
    for name in names:
        own = [(route, kind) for route, kind in kinds if kind.dialect == name]
        parts.append(f"## {TITLES.get(name, name)}\n\n{DIALECTS.get(name, '')}\n\n{_dialect_table(own)}")
    return "\n".join(parts)


def _dialect_table(kinds: list[tuple[Any, Any]]) -> str:
    """The fields of each route by their effect. Routes with the same body share their rows."""
    routes: dict[Any, list[str]] = {}
    for route, kind in kinds:
        methods = ", ".join(method for method in route.all_methods if method != "HEAD")
        routes.setdefault(kind.body or route, []).append(f"`{methods} {route.path}`")
    rows = []
    for key, paths in routes.items():
        supported, others = _support(key) if isinstance(key, type) else ([], {})
        rows.append((", ".join(paths), "supported", ", ".join(supported)))
        rows += [("", what, f"{', '.join(names)}: {why}") for (what, why), names in sorted(others.items())]
    return table(("route", "support", "fields"), rows)


Others = dict[tuple[str, str], list[str]]  # (support, reason) → fields


def _support(body: type[msgspec.Struct], path: str = "") -> tuple[list[str], Others]:
    """The supported fields, and the others with the reason.

    Fields of a nested object follow it, such as `parameters.truncate`.
    """
    notes = meanings.limits(body)
    supported: list[str] = []
    others: Others = {}
    for field in msgspec.structs.fields(body):
        name, note = _code(path + field.encode_name), notes.get(field.encode_name)
        if isinstance(note, NoEffect):
            others.setdefault(("no effect", note.reason), []).append(name)
            continue
        if isinstance(note, Refused):
            shown = name + _unless(field.default, note.accepts)
            others.setdefault(("refused", note.reason), []).append(shown)
            continue
        supported.append(name)
        for inner in () if path else _objects(msgspec.inspect.type_info(field.type)):
            its_supported, its_others = _support(inner, f"{field.encode_name}.")
            supported += its_supported
            for key, names in its_others.items():
                others.setdefault(key, []).extend(names)
    return supported, others


def _objects(kind: msgspec.inspect.Type) -> list[type[msgspec.Struct]]:
    """The object types that a field accepts, directly or in a list."""
    if isinstance(kind, msgspec.inspect.StructType):
        return [kind.cls]
    if isinstance(kind, msgspec.inspect.UnionType):
        return [found for part in kind.types for found in _objects(part)]
    if isinstance(kind, msgspec.inspect.Metadata):
        return _objects(kind.type)
    return _objects(kind.item_type) if isinstance(kind, msgspec.inspect.ListType) else []


def _unless(default: Any, accepts: Iterable[Any]) -> str:
    """The values that a refused field accepts, as ` other than …`."""
    values = [value for value in (default, *accepts) if value is not None and value is not msgspec.NODEFAULT]
    texts = dict.fromkeys(_code(msgspec.json.encode(value).decode()) for value in values)
    return f" other than {' or '.join(texts)}" if texts else ""


_JSON = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "None": "null",
    "True": "true",
    "False": "false",
}


def as_json(text: str) -> str:
    """Replace Python's names of types and values by JSON's. Quoted names are field values and stay."""
    text = re.sub(r"(?<!')\b(?:str|int|float|bool|None|True|False)\b", lambda match: _JSON[match[0]], text)
    return re.sub(r"dict\[string, (\w+)\]", r"object", text).replace("'", '"')


def _shown_default(field: Field) -> str:
    return field.default if field.default == "required" else _code(field.default)


def first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")


# --- Python -------------------------------------------------------------------------------------------------


def engine() -> str:
    """Every public method of Engine."""
    from penstock import Engine

    return _methods(Engine, "Engine")


def async_engine() -> str:
    """The methods of AsyncEngine: only names for methods that Engine has too, the others in full."""
    from penstock import AsyncEngine, Engine

    own = [name for name, _ in _public(AsyncEngine) if not hasattr(Engine, name)]
    shared = [name for name, _ in _public(AsyncEngine) if hasattr(Engine, name)]
    line = "Methods that `Engine` has too, awaited here: " + ", ".join(map(_code, shared)) + ".\n\n"
    return line + _methods(AsyncEngine, "AsyncEngine", own)


def _methods(cls: type, heading: str, only: list[str] | None = None) -> str:
    parts = []
    for name, member in _public(cls):
        if only is not None and name not in only:
            continue
        text = inspect.getdoc(member) or ""
        if isinstance(member, property):
            if text:
                parts.append(f"### `{heading}.{name}`\n\n{text}\n")
        else:
            code = f"```python\n{signature(member, name, _aliases())}\n```"
            parts.append(f"### `{heading}.{name}`\n\n{code}\n\n{text}\n")
    return "\n".join(parts)


def _public(cls: type) -> list[tuple[str, Any]]:
    """Public methods and properties in the order of the source, base classes last."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        for name, member in vars(base).items():
            is_member = inspect.isfunction(member) or isinstance(member, property)
            if not name.startswith("_") and is_member and name not in found:
                found[name] = member
    return list(found.items())


def results() -> str:
    """Every exported record type: results and parameters."""
    import penstock

    parts = []
    for name in penstock.__all__:
        cls = getattr(penstock, name)
        if not isinstance(cls, type) or name in ("Engine", "AsyncEngine", "EngineConfig", "ServerConfig"):
            continue
        if dataclasses.is_dataclass(cls) or issubclass(cls, msgspec.Struct | tuple):
            text = inspect.getdoc(cls) or ""
            text = "" if text.startswith(f"{name}(") else text  # generated by the decorator
            parts.append(f"### `{name}`\n\n{text}\n\n{_record(cls)}")
    return "\n".join(parts)


def _aliases() -> dict[Any, str]:
    from penstock.inputs.processor import Inputs

    return {Inputs: "Inputs"}


def _record(cls: type) -> str:
    if cls.__name__ == "SamplingParams":  # its fields are described at the server's route
        return _body(cls, "CompletionRequest")
    rows = [
        (_code(each.name), _code(each.type), _shown_default(each), each.comment) for each in fields_of(cls)
    ]
    return table(("field", "type", "default", "meaning"), rows)


# --- CLI ----------------------------------------------------------------------------------------------------


def cli() -> str:
    """Every command with its arguments and flags, read from the parser."""
    import typer

    from penstock.cli.main import app

    parts: list[str] = []

    def visit(command: Any, path: str) -> None:
        children = getattr(command, "commands", None)
        if children is None:
            parts.append(_command(command, path))
            return
        for name, child in children.items():
            visit(child, f"{path} {name}")

    visit(typer.main.get_command(app), "penstock")
    return "\n".join(parts)


def _command(command: Any, path: str) -> str:
    text = _with_examples(inspect.cleandoc(command.help or "").replace("\f", "").replace("\b", ""))
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    usage = " ".join([path, *(_argument(each) for each in arguments), "[OPTIONS]"])
    parts = [f"## `{path}`\n\n{text}\n\n```text\n{usage}\n```\n"]
    if arguments:
        rows = [(_code(_argument(each)), getattr(each, "help", None) or "") for each in arguments]
        parts.append(table(("argument", "meaning"), rows))
    panels: dict[str, list[Any]] = {}
    for each in command.params:
        if each.param_type_name == "option" and not each.hidden:
            panels.setdefault(getattr(each, "rich_help_panel", None) or "Options", []).append(each)
    for panel, options in panels.items():
        rows = [(_flag(each), _value(each), _flag_default(each), _help(each)) for each in options]
        parts.append(f"**{panel}**\n\n" + table(("flag", "value", "default", "meaning"), rows))
    return "\n".join(parts)


def _with_examples(text: str) -> str:
    """A command's help, with its indented examples as a code block."""
    before, mark, examples = text.partition("Examples:\n")
    if not mark:
        return text
    return f"{before.strip()}\n\n```bash\n{inspect.cleandoc(examples)}\n```"


def _argument(each: Any) -> str:
    name = each.metavar or (each.name or "").upper()
    name += "…" if each.nargs == -1 else ""
    return name if each.required else f"[{name}]"


def _flag(each: Any) -> str:
    names = ", ".join(_code(name) for name in each.opts)
    return names + (
        ", " + ", ".join(_code(name) for name in each.secondary_opts) if each.secondary_opts else ""
    )


def _help(each: Any) -> str:
    return (each.help or "") + (f" Environment variable: `{each.envvar}`." if each.envvar else "")


def _value(each: Any) -> str:
    if each.is_flag or each.secondary_opts:
        return ""
    if each.metavar:
        return _code(each.metavar)
    if (kind := getattr(each, "type", None)) is not None:  # a click type, in older releases of typer
        choices = getattr(kind, "choices", None)
        names = (
            [str(getattr(choice, "value", choice)) for choice in choices] if choices else [kind.name.upper()]
        )
        return " ".join(map(_code, names))
    return _type_value(each.type_descriptor.annotation)


_VALUES = {"str": "TEXT", "int": "INTEGER", "float": "FLOAT", "Path": "PATH", "bool": ""}


def _type_value(hint: Any) -> str:
    kinds = [each for each in (typing.get_args(hint) or (hint,)) if each is not type(None)]
    kind = kinds[0]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " ".join(_code(str(member.value)) for member in kind)
    name = getattr(kind, "__name__", str(kind))
    return _code(_VALUES.get(name, name.upper()))


def _flag_default(each: Any) -> str:
    value = each.default
    if isinstance(each.show_default, str):
        return each.show_default  # a default in words, because the value is decided later
    if value == [] or value is None or value is False or callable(value) or "UNSET" in repr(value).upper():
        return ""
    if value is True:
        return "on"
    return _code(str(getattr(value, "value", value)))


# --- configuration and metrics ------------------------------------------------------------------------------


def engine_config() -> str:
    from penstock.cli.flags import ENGINE_FLAGS, INTERNAL
    from penstock.config import EngineConfig

    return _config(EngineConfig, ENGINE_FLAGS, INTERNAL)


def server_config() -> str:
    from penstock.cli.flags import INTERNAL, SERVER_FLAGS
    from penstock.config import ServerConfig

    return _config(ServerConfig, SERVER_FLAGS, INTERNAL)


def pooler_config() -> str:
    from penstock.config import PoolerConfig

    return _record(PoolerConfig)


def _config(cls: type, flags: Iterable[Any], without_flag: dict[str, str]) -> str:
    """The fields with the help of their flags. A field without a flag shows its comment in the source."""
    by_field = {flag.field: flag for flag in flags}
    rows = []
    for each in fields_of(cls):
        if (flag := by_field.get(each.name)) is None:
            why = without_flag.get(each.name)
            text = f"{each.comment} ({why})" if why else each.comment
            rows.append((_code(each.name), _code(each.type), _shown_default(each), "", text))
            continue
        default = flag.default_text or _shown_default(each)
        rows.append((_code(each.name), _code(each.type), default, _code(flag.name), flag.help))
    return table(("field", "type", "default", "flag of `serve`", "meaning"), rows)


def foreign_flags() -> str:
    """The flags of other servers without their own field, and their effect."""
    from penstock.cli.foreign import FOREIGN_FLAGS, effect

    rows = [(", ".join(map(_code, flag.names)), flag.server, effect(flag) + ".") for flag in FOREIGN_FLAGS]
    return table(("flag", "of", "here"), sorted(rows))


def metrics() -> str:
    """Every metric that the server exports, with its labels."""
    rows = []
    for module in METRIC_MODULES:
        for metric in vars(importlib.import_module(module)).values():
            if not hasattr(metric, "describe") or isinstance(metric, type):
                continue
            (family,) = metric.describe()
            if family.name.startswith("penstock_"):
                labels = ", ".join(map(_code, metric._labelnames))
                suffix = "_total" if family.type == "counter" else ""
                rows.append((_code(family.name + suffix), family.type, labels, family.documentation))
    return table(("metric", "type", "labels", "meaning"), sorted(rows))


def metric_aliases(server: str) -> str:
    """Another server's metrics that --metric-aliases exports, and those that it does not."""
    from penstock.api.metric_aliases import ALIASES, MISSING

    rows = [(_code(each.name), each.type, _code(each.source), each.meaning) for each in ALIASES[server]]
    shown = table(("alias", "type", "from", "meaning here"), rows)
    return f"{shown}\n\nNot shown: {', '.join(map(_code, MISSING[server]))}."


def gpu_rates() -> str:
    """Tokens per second on each GPU that the planner knows: measured on one, estimates elsewhere."""
    from penstock.planning.predict import predicted_rate
    from penstock.planning.quantities import shown_number
    from penstock.planning.rates import recorded_rates

    rates, length = recorded_rates(), 128
    models = [each for each in rates.measured[0].model if each.name in GPU_RATE_MODELS]
    rows = []
    for name, gpu in sorted(rates.gpu.items()):
        cells = []
        for model in models:
            rate = predicted_rate(name, model.shape, [length], texts=False)
            seconds = rate.seconds_per_token(length)
            few, many = (shown_number(1 / (seconds * share)) for share in (rate.high, rate.low))
            cells.append(f"{shown_number(1 / seconds)} ({few} to {many})")
        is_measured = any(each.gpu == name for each in rates.measured)
        known = "measured" if is_measured else "estimate, not measured"
        rows.append((name, f"{gpu.tflops:g}", f"{gpu.bandwidth:g}", f"{gpu.memory:g}", known, *cells))
    names = [model.name for model in models]
    return table(("GPU", "bf16 TFLOP/s", "GB/s", "GB", "basis", *names), rows)


RENDERERS: dict[str, Callable[[], str]] = {
    "http": http,
    "dialects": dialects,
    "engine": engine,
    "async-engine": async_engine,
    "results": results,
    "cli": cli,
    "engine-config": engine_config,
    "server-config": server_config,
    "pooler-config": pooler_config,
    "foreign-flags": foreign_flags,
    "metrics": metrics,
    "gpu-rates": gpu_rates,
    "tei-metrics": partial(metric_aliases, "tei"),
    "vllm-metrics": partial(metric_aliases, "vllm"),
}
