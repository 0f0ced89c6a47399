"""Opens a model in this process: finds its files, settles the configuration, loads it on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.checkpoint.spec import ModelSpec, describe, with_max_model_len
from penstock.config import EngineConfig, Resolved, from_mapping
from penstock.offline.local import LocalEngine
from penstock.runner.load import settle
from penstock.tasks.model import TextModel

UNLIMITED = 2**62  # tokens: a caller in this process waits instead of being refused


@dataclass(frozen=True, slots=True, eq=False)
class DescribedModel:
    """What is known of a model before its weights are loaded."""

    config: EngineConfig
    spec: ModelSpec
    settings: Resolved

    @classmethod
    def of(cls, model: str | None, options: Mapping[str, Any]) -> DescribedModel:
        """`options` are fields of `EngineConfig`."""
        config = from_mapping(EngineConfig, {"model": model, **options})
        described = describe(config)
        settings = settle(config, described)
        return cls(config, with_max_model_len(described, settings.max_model_len), settings)

    def load(self, *, chat_template: str | None = None) -> LocalModel:
        text = TextModel(self.spec, chat_template=chat_template)
        settings = msgspec.structs.replace(self.settings, max_queued_tokens=UNLIMITED)
        return LocalModel(self.spec, self.settings, text, LocalEngine(self.spec, settings))


@dataclass(frozen=True, slots=True, eq=False)
class LocalModel:
    """A model loaded in this process."""

    spec: ModelSpec
    settings: Resolved
    text: TextModel
    engine: LocalEngine

    def close(self) -> None:
        """Finish what was submitted, then release the device."""
        self.text.close()
        self.engine.close()
