"""Opening a model in this process: find its files, resolve its settings, load it on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.checkpoint.adapter_files import adapter_digest, find_adapter
from penstock.checkpoint.describe import describe
from penstock.checkpoint.spec import ModelSpec, with_max_model_len
from penstock.config import EngineConfig, LoraModule, Resolved, from_mapping
from penstock.errors import AdapterNotFound, ConfigError, shown
from penstock.offline.adapters import LocalAdapters
from penstock.offline.local import LocalEngine
from penstock.runner.load import settle
from penstock.tasks.model import TextModel

UNLIMITED = 2**62  # tokens; callers in this process wait instead of being refused


@dataclass(frozen=True, slots=True, eq=False)
class DescribedModel:
    """A model whose files are described but whose weights are not loaded."""

    config: EngineConfig
    spec: ModelSpec
    settings: Resolved

    @classmethod
    def of(cls, model: str | None, options: Mapping[str, Any]) -> DescribedModel:
        """`options` are fields of `EngineConfig`. The argument `model` replaces `model` in `options`."""
        named = options if model is None else {**options, "model": model}
        if "data_parallel_size" in named:
            raise ConfigError(
                "data_parallel_size is for `penstock serve`: an engine in a Python process is a single one; "
                "serve the model, or run several processes, for example with Ray",
                param="data_parallel_size",
            )
        modules = named.get("lora_modules")
        if isinstance(modules, Mapping):
            named = {**named, "lora_modules": [LoraModule(name, path) for name, path in modules.items()]}
        config = from_mapping(EngineConfig, dict(named))
        if config.pooler_config.enable_chunked_processing:
            raise ConfigError(
                "enable_chunked_processing is for servers; here, embed with chunking: mean",
                param="pooler_config",
            )
        return cls.of_config(config)

    @classmethod
    def of_config(cls, config: EngineConfig) -> DescribedModel:
        described = describe(config)
        settings = settle(config, described)
        return cls(config, with_max_model_len(described, settings.max_model_len), settings)

    def adapter_mark(self, name: str) -> str:
        """Return an identity for vectors of this adapter: its name and a digest of its files."""
        module = next((each for each in self.config.lora_modules if each.name == name), None)
        if module is not None:
            folder = find_adapter(module.path, download_dir=self.config.download_dir)
            return f"{name}@{adapter_digest(folder)}"
        if name in self.spec.adapters:
            return name
        known = ", ".join((*self.spec.adapters, *(each.name for each in self.config.lora_modules))) or "none"
        raise AdapterNotFound(
            f"adapter {shown(name)} is not known; model {self.spec.name} has: {known}", param="adapter"
        )

    def load(self, text: TextModel | None = None) -> LocalModel:
        """Load the weights. `text` is the model's text side, if the caller has already created it."""
        text = TextModel(self.spec) if text is None else text
        settings = msgspec.structs.replace(
            self.settings, max_queued_tokens=UNLIMITED, max_queue_seconds=0.0, shares_steps=False
        )
        engine = LocalEngine(self.spec, settings)
        adapters = LocalAdapters(self.config, self.spec, engine)
        try:
            for module in self.config.lora_modules:
                adapters.load(module.name, module.path)
        except BaseException:
            engine.close()
            raise
        return LocalModel(self.spec, self.settings, text, engine, adapters)


@dataclass(frozen=True, slots=True, eq=False)
class LocalModel:
    """A model loaded in this process."""

    spec: ModelSpec
    settings: Resolved
    text: TextModel
    engine: LocalEngine
    adapters: LocalAdapters

    def close(self) -> None:
        """Finish all submitted requests, then release the device."""
        self.text.close()
        self.engine.close()


@contextmanager
def open_model(options: Mapping[str, Any], *, chat_template: str | None = None) -> Iterator[LocalModel]:
    """Load a model for the duration of a block. `options` are fields of `EngineConfig`."""
    described = DescribedModel.of(None, options)
    local = described.load(TextModel(described.spec, chat_template=chat_template))
    try:
        yield local
    finally:
        local.close()
