"""Gives a command the fields of option groups as its flags, so that each flag is declared once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec
from typer.core import TyperCommand

_SEVERAL = (
    "--backend",
    "--goodput",
    "--header",
    "--only",
    "--server",
    "--server-backend",
    "--server-endpoint",
    "--server-model",
)


class SpreadCommand(TyperCommand):
    """Lets one flag take several values, `--goodput e2el:200 ttft:50`, as argparse programs do."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args))


def spread(args: list[str]) -> list[str]:
    """Repeat the flag before each further value: these commands take no positional arguments."""
    out: list[str] = []
    flag, values = "", 0
    for arg in args:
        if arg.startswith("-"):
            flag, values = (arg if arg in _SEVERAL else ""), 0
        elif flag:
            values += 1
            if values > 1:
                out.append(flag)
        out.append(arg)
    return out


def with_flags(*groups: type[msgspec.Struct]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The decorated function takes one value of each group, then its own parameters by name."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = list(inspect.signature(function).parameters.values())[len(groups) :]
        hints = get_type_hints(function, include_extras=True)
        parameters = [parameter for group in groups for parameter in _parameters(group)]
        parameters += [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
            for parameter in own
        ]

        def command(**values: Any) -> Any:
            filled = [
                group(**{name: values.pop(name) for name in group.__struct_fields__}) for group in groups
            ]
            return function(*filled, **values)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _parameters(group: type[msgspec.Struct]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=[] if field.default is msgspec.NODEFAULT else field.default,
            annotation=hints[field.name],
        )
        for field in msgspec.structs.fields(group)
    ]
