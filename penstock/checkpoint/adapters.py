"""The adapters that a checkpoint carries beside its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def adapter_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """jina-embeddings-v3's task adapters that a request may choose; none once `lora_task` merges one."""
    if config.get("lora_task") is not None:
        return ()
    return tuple(map(str, config.get("lora_adaptations") or ()))
