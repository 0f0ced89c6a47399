"""Runs the vision tower for the images of a step and keeps their features in a store on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from penstock.layers.batch import Batch
from penstock.layers.images import ImageTokens, VisionTower
from penstock.runner.inputs import ImageTensors, image_arrays
from penstock.runner.staging import Staging
from penstock.types import ImagePlan, Ints


class ImageRunner:
    """The vision tower of a model, and a store of features that it has computed: [slots, feature width]."""

    def __init__(self, tower: VisionTower, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tower = tower
        self.store = torch.zeros((num_slots, tower.feature_width), dtype=dtype, device=device)

    def send(
        self, staging: Staging, arrays: list[Ints], images: ImagePlan
    ) -> tuple[Sequence[Tensor], ImageTensors]:
        """Send the arrays and the step's images to the device in one copy."""
        layout = self.tower.layout(images.grids) if images.num_images else []
        own = image_arrays(images, layout)
        tensors, patches = staging.send_with_bytes(arrays + own, images.patches)
        sent = iter(tensors[len(arrays) :])
        return tensors[: len(arrays)], ImageTensors.take(images, len(layout), patches, sent)

    def __call__(self, batch: Batch, images: ImagePlan, tensors: ImageTensors) -> Batch:
        """Run the tower on new images, and return the batch with the features of all its images."""
        if tensors.batch is not None and tensors.write_slots is not None:
            features = self.tower(tensors.batch).to(self.store.dtype)
            self.store.index_copy_(0, tensors.write_slots.long(), features)
        features = self.store.index_select(0, tensors.read_slots)
        return replace(batch, images=ImageTokens(tensors.tokens, features, images.num_text_rows))
