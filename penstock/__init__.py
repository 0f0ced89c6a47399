"""Penstock: an inference engine and server for pooling models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["AsyncEngine", "Engine", "EngineConfig", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.offline.engine import AsyncEngine, Engine
    from penstock.types import SamplingParams


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import penstock` costs nothing."""
    if name in ("Engine", "AsyncEngine"):
        from penstock.offline import engine as offline

        return getattr(offline, name)
    if name == "EngineConfig":
        from penstock.config import EngineConfig

        return EngineConfig
    if name == "SamplingParams":
        from penstock.types import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
