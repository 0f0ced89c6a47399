"""Any architecture that transformers knows, under Penstock's scheduler and poolers.

Slower than a native family, and only its hidden states: rows of equal length go through the Hugging
Face module as one batch, so that nothing is padded and only a key limit needs a mask.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ModelLoadError
from penstock.layers.batch import Batch
from penstock.layers.head import TaskHead
from penstock.types import Task


class TransformersModel:
    """The module that `AutoModel` makes of a folder."""

    def __init__(
        self, folder: Path, overrides: dict[str, Any], dtype: torch.dtype, device: torch.device
    ) -> None:
        try:
            from transformers import AutoConfig, AutoModel
        except ImportError:
            raise ModelLoadError("--model-impl transformers needs pip install 'penstock[hf]'") from None
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, **overrides)
            module = AutoModel.from_pretrained(folder, config=config, local_files_only=True, dtype=dtype)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelLoadError(f"transformers cannot load {folder}: {error}") from None
        self.module: Any = module.to(device).eval()
        self.hidden_size = int(config.hidden_size)
        self.segments = int(getattr(config, "type_vocab_size", 0) or 0)
        self.is_causal = False  # rows are never cut here
        self.prunes_last_layer = False
        self.heads: dict[Task, TaskHead] = {}
        self.ignored_tensors: tuple[str, ...] = ()

    def __call__(self, batch: Batch) -> Tensor:
        out: Tensor | None = None
        for group in batch.groups:
            stop = group.first_token + group.num_rows * group.length
            shape = (group.num_rows, group.length)
            ids = batch.token_ids[group.first_token : stop].view(shape).long()
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            if group.key_limit:
                inputs["attention_mask"][:, group.key_limit :] = 0
            if batch.type_ids is not None and self.segments:
                inputs["token_type_ids"] = batch.type_ids[group.first_token : stop].view(shape).long()
            hidden: Tensor = self.module(**inputs).last_hidden_state.flatten(0, 1)
            if out is None:
                out = hidden.new_empty((batch.num_tokens, hidden.shape[-1]))
            out[group.first_token : stop] = hidden
        assert out is not None
        return out
