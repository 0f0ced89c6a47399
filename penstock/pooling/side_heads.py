"""Heads stored in separate files beside a checkpoint: BGE-M3's lexical weights and token vectors.

They are small, so they are always in fp32.
"""

from __future__ import annotations

import torch
from safetensors import SafetensorError
from torch import Tensor

from penstock.checkpoint.spec import ModelSpec
from penstock.errors import ModelLoadError
from penstock.layers.head import TaskHead
from penstock.layers.linear import Linear
from penstock.weights.pickles import read_tensors


def lexical_head(spec: ModelSpec, file: str, load_format: str, seed: int, device: torch.device) -> TaskHead:
    """relu(linear(hidden)): one weight per token."""
    return _head(spec, file, 1, "relu", load_format, seed, device)


def multi_vector_head(
    spec: ModelSpec, file: str, load_format: str, seed: int, device: torch.device
) -> TaskHead:
    """linear(hidden): one vector per token."""
    return _head(spec, file, spec.token_dim, "identity", load_format, seed, device)


def _head(
    spec: ModelSpec, file: str, outputs: int, act: str, load_format: str, seed: int, device: torch.device
) -> TaskHead:
    shapes = {"weight": (outputs, spec.token_dim), "bias": (outputs,)}
    if load_format == "dummy":
        weight = torch.randn(shapes["weight"], generator=torch.Generator().manual_seed(seed)) * 0.02
        tensors = {"weight": weight, "bias": torch.zeros(outputs)}
    else:
        tensors = _read(spec, file, shapes)
    layer = Linear(tensors["weight"].to(device).float(), tensors["bias"].to(device).float(), act)
    return TaskHead("all", lambda hidden: layer(hidden.float()), outputs)


def _read(spec: ModelSpec, name: str, wanted: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    file = spec.path / name
    try:
        tensors = read_tensors(file)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"cannot read {file}: {error}") from None
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    if shapes != wanted:
        raise ModelLoadError(f"{file} holds tensors of shapes {shapes}; BGE-M3's head has {wanted}")
    return tensors
