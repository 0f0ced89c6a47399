"""Allocates slots of the image feature store on the device, by image content. Bookkeeping only, no tensors.

The features of all images of a step are in the store while the step runs. They stay until their slots are
needed, so that a repeated image, or one whose tokens are spread over steps, does not run again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from penstock.errors import BadValue
from penstock.types import ImagePlan, Ints, Request


@dataclass(slots=True, eq=False)
class _Entry:
    slots: Ints  # [features]
    writer: int = 0  # the last step that was planned to write these features
    is_ready: bool = False  # whether that step has succeeded


class ImageCache:
    """Slots of the feature store.

    If no finished step has written an image, each step that needs it writes it, to the same slots. An image
    is ready when the last step planned to write it has succeeded. So features of a failed step are never
    read.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.hits = self.lookups = 0
        self._free: Ints = np.arange(size, dtype=np.int32)
        self._num_free = size
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._step = 0

    def begin_step(self) -> int:
        """Begin to plan a step and return its number. It writes the images that `place` finds missing."""
        self._step += 1
        return self._step

    def check(self, request: Request) -> None:
        """Raise `BadValue` if a row of the request has more image tokens than the store can hold."""
        if (images := request.images) is None or not images.num_images:
            return
        per_row = np.bincount(images.rows, weights=images.num_tokens)
        if int(per_row.max()) > self.size:
            raise BadValue(
                f"the images of one input have {int(per_row.max())} tokens; the engine can hold {self.size}. "
                "Send smaller or fewer images",
                param="images",
            )

    def place(self, key: bytes, num_features: int, used: Collection[bytes]) -> tuple[Ints, bool]:
        """The slots of an image, and whether its features are already there. Never evicts the images in
        `used`, which belong to the same step."""
        self.lookups += 1
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            self.hits += entry.is_ready
            if not entry.is_ready:
                entry.writer = self._step
            return entry.slots, entry.is_ready
        while self._num_free < num_features:
            self._evict_oldest(used)
        self._num_free -= num_features
        slots = self._free[self._num_free : self._num_free + num_features].copy()
        self._entries[key] = _Entry(slots, self._step)
        return slots, False

    def publish(self, plan: ImagePlan) -> None:
        """Mark the images that a step has written as ready, because the step has succeeded."""
        for key in plan.keys:
            entry = self._entries.get(key)
            if entry is not None and entry.writer == plan.number:
                entry.is_ready = True

    def forget(self) -> None:
        """Drop every entry, because the contents of the store are lost."""
        self._entries.clear()
        self._free, self._num_free = np.arange(self.size, dtype=np.int32), self.size

    def check_integrity(self) -> None:
        """Assert that every slot is free or belongs to one image."""
        slots = [self._free[: self._num_free], *(entry.slots for entry in self._entries.values())]
        assert sorted(np.concatenate(slots).tolist()) == list(range(self.size))

    def _evict_oldest(self, used: Collection[bytes]) -> None:
        key = next((key for key in self._entries if key not in used), None)
        if key is None:
            raise RuntimeError("the images of one step do not fit into the store of image features")
        slots = self._entries.pop(key).slots
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)
