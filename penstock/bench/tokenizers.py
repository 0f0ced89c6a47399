"""Choice of the tokenizer that makes prompts and counts tokens: a local file, or the server's own."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.bench.datasets.tokens import PromptTokenizer, is_local, load_tokenizer
from penstock.bench.options import ServerOptions
from penstock.bench.probe import Unreachable
from penstock.bench.server_tokenizer import ServerTokenizer
from penstock.bench.target import Target
from penstock.errors import BadValue


@dataclass(slots=True)
class TokenizerFinder:
    """Finds the tokenizer when it is first needed.

    The order is: --tokenizer, the folder --model, the server's `/tokenize`, a hub id. The hub is only
    contacted for a name that the user gave.
    """

    options: ServerOptions
    model: str  # name in requests
    target: Target | None  # None: do not use the server's tokenizer
    name: str | None = None  # name of the tokenizer that was found
    _found: PromptTokenizer | None = None

    def find(self) -> PromptTokenizer:
        if self._found is None:
            self._found = self._choose()
        return self._found

    def _choose(self) -> PromptTokenizer:
        given, model = self.options.tokenizer, self.options.model
        if given is not None or is_local(model):
            return self._load(given or model)
        if self.target is None:
            return self._load(model)
        try:
            served = ServerTokenizer(self.target, self.model)
        except Unreachable:
            raise
        except BadValue as error:
            return self._load(model or self.model, asks_hub=model is not None, tried=error.message)
        self.name = served.name
        return served

    def _load(self, name: str | None, *, asks_hub: bool = True, tried: str = "") -> PromptTokenizer:
        try:
            found = load_tokenizer(name, asks_hub=asks_hub)
        except BadValue as error:
            message = f"{error.message} ({tried})" if tried else error.message
            raise BadValue(message, param="tokenizer") from None
        self.name = name
        return found
