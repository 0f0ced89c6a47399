"""Reference hidden states of a text with pictures, from transformers' image processor and Qwen-VL models."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers

from tests.parity.qwen_vl import IMAGE, MEAN, PATCH, STD, qwen_tokenizer
from tests.parity.reference import Vectors


class Reference:
    """A Qwen-VL model of transformers and the image processor from its folder."""

    def __init__(self, model: Any) -> None:
        self.model = model.model if hasattr(model, "lm_head") else model
        self.processor = transformers.Qwen2VLImageProcessorPil(
            patch_size=PATCH,
            merge_size=2,
            temporal_patch_size=2,
            min_pixels=64,
            max_pixels=1 << 14,
            image_mean=MEAN,
            image_std=STD,
        )

    @torch.inference_mode()
    def states(self, text: str, pictures: list[Any], *, plain_positions: bool = False) -> Vectors:
        """The hidden states of a text with a placeholder for each picture."""
        inputs: dict[str, Any] = {}
        if pictures:
            inputs = dict(self.processor(pictures, return_tensors="pt"))
        ids: list[int] = []
        grids = iter(inputs.get("image_grid_thw", torch.zeros(0)))
        for token in qwen_tokenizer().encode(text).ids:
            ids += [token] * (int(next(grids).prod()) // 4 if token == IMAGE else 1)
        tokens = torch.tensor([ids])
        if pictures:
            inputs["mm_token_type_ids"] = (tokens == IMAGE).int()
        if plain_positions:
            inputs["position_ids"] = torch.arange(len(ids)).expand(3, 1, -1)
        self.model.rope_deltas = None
        states: Vectors = self.model(tokens, **inputs).last_hidden_state[0].numpy()
        return states

    def vector(self, text: str, pictures: list[Any], *, plain_positions: bool = False) -> Vectors:
        last = self.states(text, pictures, plain_positions=plain_positions)[-1]
        return last / np.linalg.norm(last)
