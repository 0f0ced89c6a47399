"""LoRA adapters of a model on Ray: the adapters of its configuration, the same on every replica.

Every process finds the files itself, and gives the same adapter the same id. Ids and contents are part of the
fingerprint by which an ingress selects replicas. So a replica never gets a request for an adapter that it
does not have.
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
    """Read the adapters of `lora_modules`, in order. May download their files."""
    check_lora_modules(config, spec, aliases)
    return initial_adapters(config, spec, itertools.count(len(spec.adapters)).__next__)
