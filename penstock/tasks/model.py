"""`TextModel`: tokenizer and input rules of one model, used by every task to prepare requests. Free of
torch."""

from __future__ import annotations

from copy import copy
from functools import cached_property

import msgspec

from penstock.checkpoint.spec import ModelSpec
from penstock.inputs.batcher import BatchTokenizer
from penstock.inputs.chat import ModelTemplate
from penstock.inputs.generation import GenerationInputs
from penstock.inputs.processor import InputProcessor
from penstock.inputs.static_queries import StaticQueries
from penstock.inputs.tokenizer import Tokenizer


class TextModel:
    """A model's description, its tokenizer and its input rules."""

    def __init__(self, spec: ModelSpec, *, chat_template: str | None = None) -> None:
        """`chat_template` replaces the model's own: Jinja source, or the name of one of its templates."""
        self.spec = spec
        self.tokenizer = Tokenizer(spec.path)
        self.processor = InputProcessor(spec, self.tokenizer)
        self.batcher = BatchTokenizer(self.tokenizer)
        route = spec.query_route
        self.queries = None if route is None else StaticQueries(route, self.processor)
        self._chat_template = chat_template
        self.chat = ModelTemplate(spec.path, chat_template)

    @cached_property
    def generation(self) -> GenerationInputs:
        """Rules for prompts and sampling parameters. Raises `NotPossible` if the model does not generate."""
        return GenerationInputs(self.spec, self.tokenizer, self._chat_template)

    @cached_property
    def with_lora(self) -> TextModel:
        """This model for requests with a LoRA adapter, which need no adapter of the checkpoint itself."""
        if not self.spec.requires_adapter:
            return self
        other = copy(self)
        other.spec = msgspec.structs.replace(self.spec, requires_adapter=False)
        other.processor = copy(self.processor)
        other.processor.spec = other.spec
        return other

    def warm_up(self) -> None:
        """Build and load in advance what the first text would otherwise wait for."""
        self.tokenizer.encode([""])

    def close(self) -> None:
        self.batcher.close()
