"""A Jinja environment that limits the time and memory a template can use.

Templates come from checkpoints, and their inputs from clients. Every value that a template creates is charged
to a budget: output, concatenations, slices, results of filters and calls, and each iteration of a loop or
call of a macro. Operations whose result may be far larger than their inputs (`*`, `replace`, `join`, formats)
are charged before they run. The clock is checked at each iteration.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE_CHARS = 1 << 20  # characters of a template's source
MAX_RENDER_UNITS = 1 << 27  # characters; a list item counts as 64, a loop iteration as 256
MAX_RENDER_S = 5.0
_MAX_DIGITS = 4096  # digits of a computed integer
_ITEM, _TURN = 64, 256
# Matches a field width of 10,000 or more, or one that is given by an argument.
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)|\{[^{}]*(\d{5}|\{)")


class TemplateLimitExceeded(TemplateError):
    """The template created too much, or took too long."""


class _Budget:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = MAX_RENDER_UNITS
        self._deadline_s = clock() + MAX_RENDER_S

    def charge(self, units: int) -> None:
        self._left -= units
        if self._left < 0:
            raise TemplateLimitExceeded(f"it makes more than {MAX_RENDER_UNITS} characters")

    def turn(self, units: int) -> None:
        self.charge(units)
        if self._clock() > self._deadline_s:
            raise TemplateLimitExceeded(f"it takes longer than {MAX_RENDER_S:g} s")


_budget: ContextVar[_Budget] = ContextVar("template_budget")


@contextmanager
def limited(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Give templates that are rendered in this context a budget of their own."""
    token = _budget.set(_Budget(clock))
    try:
        yield
    finally:
        _budget.reset(token)


def _charge(units: int) -> None:
    _budget.get().charge(max(0, units))


def _size(value: Any) -> int:
    """The units of a value, without the contents of its items."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 8
    if isinstance(value, list | tuple | dict | set | frozenset):
        return _ITEM * len(value)
    return 1


def _charge_text(value: Any) -> None:
    """Charge for a value that is written as text, including all nested items."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        _charge(_ITEM + _size(value))
        if isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value


def _charged(value: Any) -> Any:
    _charge(1 + _size(value))
    return value


def _charge_format(form: str, values: Any) -> None:
    if _WIDE_FORMAT.search(form.replace("{{", "").replace("}}", "")):
        raise TemplateLimitExceeded("it formats a field of 10,000 characters or more")
    num_fields = form.count("%") + form.count("{")
    _charge_text(values)
    items = values if isinstance(values, list | tuple) else (values,)
    if num_fields > len(items):  # a value may be written more than once
        _charge(num_fields * max((len(str(item)) for item in items), default=0))


def _charge_call(owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Charge for a method or filter before it is called."""
    values = (*args, *kwargs.values())
    numbers = [abs(value) for value in values if isinstance(value, int)]
    if name == "replace" and isinstance(owner, str) and len(values) >= 2:
        old, new = str(values[0]), str(values[1])
        _charge(len(owner) + owner.count(old) * len(new))
    elif name == "join":
        items, separator = (values[0], owner) if isinstance(owner, str) else (owner, *values, "")[:2]
        _charge(len(items) * len(str(separator)))
        _charge_text(items)
    elif name == "wordwrap" and isinstance(owner, str):
        num_lines = owner.count("\n") + 1 + len(owner) // max(1, min(numbers, default=79))
        _charge(num_lines * max((len(value) for value in values if isinstance(value, str)), default=1))
    elif name in ("format", "format_map") and isinstance(owner, str):
        _charge_format(owner, values)
    elif name == "expandtabs" and isinstance(owner, str):
        _charge(owner.count("\t") * max(numbers, default=8))
    elif name in ("indent", "tojson", "pprint", "string", "urlize", "xmlattr", "escape", "e", "sum"):
        _charge_text(owner)
        lines = owner.count("\n") + 1 if isinstance(owner, str) else _items(owner)
        _charge(lines * max((*numbers, *(len(v) for v in values if isinstance(v, str))), default=0))
    elif numbers:
        _charge(max(numbers))


def _items(value: Any) -> int:
    """Number of items in a value, nested ones included. `_charge_text` has already bounded it."""
    if isinstance(value, Mapping):
        return 1 + sum(map(_items, value.values()))
    return 1 + sum(map(_items, value)) if isinstance(value, list | tuple) else 1


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that it is charged. Jinja passes some filters a context or environment first."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if len(args) > skipped:
            owner = list(args[skipped]) if name == "join" else args[skipped]
            args = (*args[:skipped], owner, *args[skipped + 1 :])
            _charge_call(owner, name, args[skipped + 1 :], kwargs)
        return _charged(function(*args, **kwargs))

    return guarded


def _charge_written(value: Any) -> None:
    if isinstance(value, str):
        _charge(len(value))
    else:
        _charge_text(value)


@pass_context
def _written(context: Context, value: Any) -> Any:
    """Charge for what the template writes. With a context, Jinja does not evaluate constants early."""
    _charge_written(value)
    return value


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates are rendered within `limited()`."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_written, optimized=False, **options)
        self.globals.pop("lipsum", None)  # it can produce text of any length

    def guard_filters(self) -> None:
        """Charge for all filters; call this after the last filter is added."""
        self.filters = {name: _guarded(name, function) for name, function in self.filters.items()}

    def limited_template(self, source: str) -> Any:
        """Compile a template so that its loops and results are charged."""
        return self.from_string(_with_charges(self.parse(source)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            sizes = left.bit_length(), right.bit_length()
            num_bits = sum(sizes) if operator == "*" else sizes[0] * abs(right)
            if num_bits > 3 * _MAX_DIGITS:
                raise TemplateLimitExceeded(f"it computes a number of more than {_MAX_DIGITS} digits")
        elif operator == "+":
            _charge(_size(left) + _size(right))
        elif operator == "*":
            _charge(_size(left) * right if isinstance(right, int) else _size(right) * left)
        elif operator == "%" and isinstance(left, str):
            _charge_format(left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)  # the sandbox wraps `format`
        if isinstance(owner, str | bytes | int):
            name = getattr(obj, "__name__", "")
            if name in ("translate", "maketrans"):
                raise TemplateLimitExceeded(f"it calls {name}, which is not supported")
            if name == "join":
                args = (_charged(list(*args)),)
            _charge_call(owner, name, args, kwargs)
        return _charged(super().call(context, obj, *args, **kwargs))

    def turn(self, units: int) -> str:
        """Charge for an iteration of a loop or a call of a macro, and for its literal text."""
        _budget.get().turn(units)
        return ""

    def concat_texts(self, *values: Any) -> str:
        for value in values:
            _charge_written(value)
        return "".join(map(str, values))

    def slice_of(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        return _charged(value[start:stop:step])


def _with_charges(tree: nodes.Template) -> nodes.Template:
    """Insert charges for each loop, macro, concatenation and slice into a template."""
    for body in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        assert isinstance(body, nodes.For | nodes.Macro | nodes.CallBlock)
        size = sum(len(text.data) for text in body.find_all(nodes.TemplateData))
        turn = _method("turn", [nodes.Const(_TURN + size)], body.lineno)
        body.body.insert(0, nodes.ExprStmt(turn, lineno=body.lineno))
    replaced = _replaced(tree)
    assert isinstance(replaced, nodes.Template) and tree.environment is not None
    replaced.set_environment(tree.environment)
    return replaced


def _replaced(node: nodes.Node) -> nodes.Node:
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, name, _replaced(value))
        elif isinstance(value, list):
            setattr(node, name, [_replaced(v) if isinstance(v, nodes.Node) else v for v in value])
    if isinstance(node, nodes.Concat):
        return _method("concat_texts", node.nodes, node.lineno)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        ends = [end or nodes.Const(None) for end in (node.arg.start, node.arg.stop, node.arg.step)]
        return _method("slice_of", [node.node, *ends], node.lineno)
    return node


def _method(name: str, args: list[Any], lineno: int) -> nodes.Call:
    """A call of a method of the environment, which template variables cannot shadow."""
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None, lineno=lineno)
