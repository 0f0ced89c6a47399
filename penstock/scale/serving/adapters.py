"""The LoRA adapters of a model on Ray: those of its configuration, the same on every replica.

Every process finds the files by itself, and gives the same adapter the same id. Ids and contents are part of
the fingerprint by which an ingress chooses replicas, so none is asked for an adapter that it has not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from penstock.checkpoint.spec import ModelSpec
from penstock.config import EngineConfig
from penstock.serving.adapters import check_lora_modules, initial_adapters
from penstock.serving.launch import AdapterLaunch


def configured_adapters(
    config: EngineConfig, spec: ModelSpec, aliases: Sequence[str] = ()
) -> tuple[AdapterLaunch, ...]:
    """The adapters of `lora_modules`, in its order. Reads their files; may download them."""
    check_lora_modules(config, spec, aliases)
    return initial_adapters(config, spec, itertools.count(len(spec.adapters)).__next__)
