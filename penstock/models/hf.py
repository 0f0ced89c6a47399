"""Any architecture that transformers knows, with Penstock's scheduler and poolers.

Slower than a native family, and limited to hidden states. Rows of equal length run as one batch, so that
nothing is padded and only a key limit needs a mask.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ModelLoadError
from penstock.layers.batch import Batch
from penstock.layers.head import TaskHead
from penstock.types import Task


class TransformersModel:
    """The module that `AutoModel` loads from a folder."""

    def __init__(
        self, folder: Path, overrides: dict[str, Any], dtype: torch.dtype, device: torch.device
    ) -> None:
        try:
            from transformers import AutoConfig, AutoModel
        except ImportError:
            raise ModelLoadError(
                "--model-impl transformers needs the transformers library, which penstock[hf] installs"
            ) from None
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, **overrides)
            module = AutoModel.from_pretrained(folder, config=config, local_files_only=True, dtype=dtype)
        except pickle.UnpicklingError:
            raise ModelLoadError(
                f"transformers cannot load {folder}: its pytorch_model.bin holds more than tensors and could "
                "run code"
            ) from None
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelLoadError(f"transformers cannot load {folder}: {error}") from None
        self.module: Any = module.to(device).eval()
        self.hidden_size = int(config.hidden_size)
        self.dtype = dtype
        self.segments = int(getattr(config, "type_vocab_size", 0) or 0)
        self.is_causal = False  # rows are never chunked here
        self.prunes_last_layer = False
        self.heads: dict[Task, TaskHead] = {}
        self.ignored_tensors: tuple[str, ...] = ()

    def __call__(self, batch: Batch) -> Tensor:
        shape = (batch.num_tokens, self.hidden_size)
        out = torch.empty(shape, dtype=self.dtype, device=batch.token_ids.device)
        for group in batch.groups:
            stop = group.first_token + group.num_rows * group.length
            rows = (group.num_rows, group.length)
            ids = batch.token_ids[group.first_token : stop].view(rows).long()
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            if group.key_limit:
                inputs["attention_mask"][:, group.key_limit :] = 0
            if batch.type_ids is not None and self.segments:
                inputs["token_type_ids"] = batch.type_ids[group.first_token : stop].view(rows).long()
            out[group.first_token : stop] = self.module(**inputs).last_hidden_state.flatten(0, 1)
        return out
