"""Opens a text generator on a local engine, for the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from penstock.inputs.generation import TextInputs
from penstock.tasks.text_generator import Writer
from penstock.tasks.text_stream import Generates


@contextmanager
def open_writer(chat_template: str | None = None, **options: Any) -> Iterator[Writer]:
    """`options` are `EngineConfig` by name."""
    from penstock.offline.engine import Engine

    with Engine(**options) as engine:
        inputs = TextInputs(engine.spec, engine._processor.tokenizer, chat_template)
        yield Writer(cast(Generates, engine._engine), inputs)
