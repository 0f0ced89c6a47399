"""How much memory a device has."""

from __future__ import annotations

import torch

from penstock.runner.cpu_memory import total_memory_bytes


def device_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return total_memory_bytes()
    return torch.cuda.get_device_properties(device).total_memory
