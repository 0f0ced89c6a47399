"""Penstock: an inference engine and server for pooling models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.inputs.generation import SamplingParams
    from penstock.offline.async_engine import AsyncEngine
    from penstock.offline.engine import Engine
    from penstock.outputs.entities import Entity
    from penstock.outputs.sparse import Term
    from penstock.tasks.embed import TextChunks
    from penstock.tasks.generate import Completion
    from penstock.tasks.score import RankedDocument
    from penstock.tasks.text_stream import TextDelta
    from penstock.types import TokenLogprobs

__all__ = [
    "AsyncEngine",
    "Completion",
    "Engine",
    "EngineConfig",
    "Entity",
    "RankedDocument",
    "SamplingParams",
    "Term",
    "TextChunks",
    "TextDelta",
    "TokenLogprobs",
    "__version__",
]

_MODULES = {
    "AsyncEngine": "penstock.offline.async_engine",
    "Completion": "penstock.tasks.generate",
    "Engine": "penstock.offline.engine",
    "EngineConfig": "penstock.config",
    "Entity": "penstock.outputs.entities",
    "RankedDocument": "penstock.tasks.score",
    "SamplingParams": "penstock.inputs.generation",
    "Term": "penstock.outputs.sparse",
    "TextChunks": "penstock.tasks.embed",
    "TextDelta": "penstock.tasks.text_stream",
    "TokenLogprobs": "penstock.types",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import penstock` is cheap."""
    if name not in _MODULES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
