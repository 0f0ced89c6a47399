"""The GPU that a thread launches kernels on. CUDA sets it per thread, and a new thread starts with GPU 0."""

from __future__ import annotations

import torch


def use_device(device: torch.device) -> None:
    """Launch the kernels of this thread on the device. Torch operations use that of their tensors anyway."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
