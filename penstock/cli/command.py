"""Turns groups of flags into a command, and prints its help.

A group declares its flags once. A command names its groups and receives one object for each of them:

    @with_options(RerankOptions, ENGINE)
    def rerank(options: RerankOptions, engine: EngineFields) -> None: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol, get_type_hints

import msgspec
from typer.core import TyperCommand
from typer.models import OptionInfo

from penstock.cli.config_file import config_file, read_config
from penstock.cli.json_flags import with_json_keys

_WIDEST_NAME = 24  # columns; the help of a flag with a longer name begins on the next line
_LAST_PANELS = (  # printed after a command's own panels, in this order
    "Model",
    "Server",
    "Scheduling",
    "Memory",
    "LoRA adapters",
    "Generation",
    "Observability",
    "Ray",
)


class OptionGroup(Protocol):
    """A group of flags, which a command receives as one value."""

    def parameters(self, taken: frozenset[str]) -> list[inspect.Parameter]:
        """Typer parameters of these flags. `taken` holds the names that other options of the command use."""

    def build(self, values: dict[str, Any]) -> Any:
        """Build the command's argument. `values` holds the parsed values of all flags of the command."""


class StructGroup:
    """A frozen struct whose fields are flags, annotated with `typer.Option` or `typer.Argument`."""

    def __init__(self, struct: type[msgspec.Struct]) -> None:
        self._struct = struct
        self._hints = get_type_hints(struct, include_extras=True)
        self._parameters = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_default(field),
                annotation=self._hints[field.name],
            )
            for field in msgspec.structs.fields(struct)
        ]

    @property
    def names(self) -> set[str]:
        return {name for field in self._struct.__struct_fields__ for name in self._names(field)}

    def parameters(self, taken: frozenset[str]) -> list[inspect.Parameter]:
        return self._parameters

    def build(self, values: dict[str, Any]) -> Any:
        return self._struct(**{name: values[name] for name in self._struct.__struct_fields__})

    def _names(self, field: str) -> tuple[str, ...]:
        return _option_names(field, self._hints[field])


@cache
def _struct_group(struct: type[msgspec.Struct]) -> StructGroup:
    return StructGroup(struct)


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return inspect.Parameter.empty


def _option_names(parameter: str, hint: Any) -> tuple[str, ...]:
    for info in getattr(hint, "__metadata__", ()):
        if isinstance(info, OptionInfo) and info.param_decls:
            return tuple(name for decl in info.param_decls for name in decl.split("/"))
    return ("--" + parameter.replace("_", "-"),)


def with_options(
    *groups: type[msgspec.Struct] | OptionGroup,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the flags of `groups`.

    The decorated function takes the value of each group in order, then its own parameters by name.
    """
    made = [_struct_group(group) if isinstance(group, type) else group for group in groups]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = list(inspect.signature(function).parameters.values())[len(made) :]
        hints = get_type_hints(function, include_extras=True)
        taken = {name for parameter in own for name in _option_names(parameter.name, hints[parameter.name])}
        taken |= {name for group in made if isinstance(group, StructGroup) for name in group.names}
        parameters = [parameter for group in made for parameter in group.parameters(frozenset(taken))]
        parameters += [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
            for parameter in own
        ]

        def command(**values: Any) -> Any:
            built = [group.build(values) for group in made]
            return function(*built, **{parameter.name: values[parameter.name] for parameter in own})

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


class Command(TyperCommand):
    """A command that prints its flags by group and truncates no name, however narrow the terminal is.

    Flags may be written with underscores, and switches with a value: `--auto_truncate false`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, plain_flags(args, self.params))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                is_argument = param.param_type_name == "argument"
                title = getattr(param, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
                sections.setdefault(title, []).append(record)
        for title in sorted(sections, key=_panel_rank):
            with formatter.section(title):
                formatter.write_dl(sections[title], col_max=_WIDEST_NAME)


def _panel_rank(title: str) -> int:
    if title in _LAST_PANELS:
        return _LAST_PANELS.index(title) + 1
    return -1 if title == "Arguments" else 0


def plain_flags(args: Sequence[str], params: Sequence[Any]) -> list[str]:
    """Rewrite arguments for the parser: flags with hyphens, switches without a value."""
    known = {name: param for param in params for name in (*param.opts, *param.secondary_opts)}
    out: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg == "--":
            return [*out, arg, *rest]
        name, equals, value = arg.partition("=")
        hyphened = name.replace("_", "-")
        if name.startswith("--") and name not in known and hyphened in known:
            name, arg = hyphened, hyphened + equals + value
        param = known.get(name)
        if param is None or not getattr(param, "is_flag", False):
            out.append(arg)
            if param is not None and param.param_type_name == "option" and not equals and rest:
                out.append(rest.pop(0))  # the flag's value, even if it looks like a flag
            continue
        if not equals and rest and rest[0].lower() in _SWITCH:
            equals, value = "=", rest.pop(0)
        out += _switched(param, name, value) if equals else [arg]
    return out


_SWITCH = {"true": True, "false": False}


def _switched(param: Any, name: str, value: str) -> list[str]:
    """Rewrite a switch with the value true or false for the parser."""
    wanted = _SWITCH.get(value.lower())
    if wanted is None:
        return [f"{name}={value}"]  # the parser will refuse it
    if name in param.secondary_opts:
        wanted = not wanted
    if wanted:
        return [param.opts[0]]
    return [param.secondary_opts[0]] if param.secondary_opts else []


class MultiValueCommand(Command):
    """Lets one flag take several values, `--goodput e2el:200 ttft:50`, as argparse programs do.

    For commands without positional arguments only.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        repeatable = {
            name for param in self.params if getattr(param, "multiple", False) for name in param.opts
        }
        return super().parse_args(ctx, repeat_flags(args, repeatable))


class ServeCommand(Command):
    """The command of `penstock serve`. Reads --config before the other flags.

    --served-model-name, --lora-modules and --allowed-media-domains take several values, but only after the
    model is named: before that, a further value may be the model.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = with_json_keys(plain_flags(args, self.params), _JSON_FLAGS)
        file = config_file(args)
        if file is not None:
            ctx.default_map = read_config(file, self.params)
        names_model = _names_model(args)
        several = {"--served-model-name", "--lora-modules", "--allowed-media-domains"}
        first = next((number for number, arg in enumerate(args) if arg in several), None)
        if first is not None and (names_model or has_argument(args[:first], self.params)):
            args = join_hosts(repeat_flags(args, several - {"--allowed-media-domains"}))
        else:  # a further value may be the model, unless it is JSON
            args = repeat_flags(args, {"--lora-modules"}, only=_is_json)
        rest = super().parse_args(ctx, args)
        if file is not None and not names_model and ctx.params["models"]:
            ctx.params["engineconfig_model"] = None  # the argument takes precedence over the file
        return rest


_JSON_FLAGS = ("--pooler-config", "--override-pooler-config", "--hf-overrides")


def _names_model(args: list[str]) -> bool:
    """Whether a flag names the model."""
    names = ("--model", "-m", "--model-id")
    return any(arg in names or arg.startswith(("--model=", "--model-id=")) for arg in args)


def _is_json(value: str) -> bool:
    return value.lstrip().startswith(("{", "["))


def has_argument(args: Sequence[str], params: Sequence[Any]) -> bool:
    """Whether `args` has a positional argument: one that is neither a flag nor the value of a flag."""
    options = {name: param for param in params for name in (*param.opts, *param.secondary_opts)}
    rest = iter(args)
    for arg in rest:
        if not arg.startswith("-"):
            return True
        if (param := options.get(arg)) is not None and not getattr(param, "is_flag", False):
            next(rest, None)
    return False


def repeat_flags(
    args: list[str], repeatable: set[str], only: Callable[[str], bool] = lambda value: True
) -> list[str]:
    """Repeat a repeatable flag before each further value that `only` accepts."""
    out: list[str] = []
    flag, values = "", 0
    for arg in args:
        if arg.startswith("-"):
            flag, values = (arg if arg in repeatable else ""), 0
        elif flag:
            values += 1
            if values > 1 and only(arg):
                out.append(flag)
        out.append(arg)
    return out


def join_hosts(args: list[str]) -> list[str]:
    """Join the hosts after --allowed-media-domains with commas. A value with a slash is a model."""
    out: list[str] = []
    is_host = False  # whether the last value is a host
    for index, arg in enumerate(args):
        if is_host and not arg.startswith("-") and "/" not in arg:
            out[-1] += "," + arg
            continue
        out.append(arg)
        is_host = (
            index > 0 and args[index - 1] == "--allowed-media-domains" and not arg.startswith(("-", "["))
        )
    return out
