"""`Engine` and `AsyncEngine` have one interface: the same methods with the same explicit parameters."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import penstock
from penstock import AsyncEngine, Engine

METHODS = [name for name, _ in inspect.getmembers(Engine, inspect.isfunction) if not name.startswith("_")]
STREAMS = {"generate_stream", "chat_stream"}


def test_both_engines_have_the_same_methods() -> None:
    asynchronous = inspect.getmembers(AsyncEngine, inspect.isfunction)
    assert [name for name, _ in asynchronous if not name.startswith("_")] == METHODS


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_the_same_parameters_on_both(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (Engine, AsyncEngine))
    assert ours.parameters == theirs.parameters
    if name not in STREAMS:
        assert ours.return_annotation == theirs.return_annotation


@pytest.mark.parametrize("name", METHODS)
def test_every_parameter_is_explicit_and_typed(name: str) -> None:
    for parameter in list(inspect.signature(getattr(Engine, name)).parameters.values())[1:]:
        assert parameter.kind is not inspect.Parameter.VAR_KEYWORD, f"{name} takes **{parameter.name}"
        assert parameter.annotation is not inspect.Parameter.empty


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_documented_once(name: str) -> None:
    assert inspect.getdoc(getattr(Engine, name)) == inspect.getdoc(getattr(AsyncEngine, name))


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_the_asynchronous_engine_are_coroutines_or_streams(name: str) -> None:
    method = getattr(AsyncEngine, name)
    wanted: Any = inspect.isasyncgenfunction if name in STREAMS else inspect.iscoroutinefunction
    assert wanted(method)


def test_result_types_are_exported() -> None:
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = penstock.Nothing
