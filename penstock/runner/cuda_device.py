"""The GPU that a thread launches kernels on. CUDA keeps it per thread, and a new thread begins with GPU 0."""

from __future__ import annotations

import torch


def use_device(device: torch.device) -> None:
    """Launch the kernels of this thread on the device. Torch's own operations follow their tensors anyway."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
