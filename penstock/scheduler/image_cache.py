"""Room in the store of image features on the device, by content. Counts only, no tensors.

Features of every image of a step are in the store while the step runs. They stay there as long as there is
room, so that an image that comes again, or whose tokens are spread over steps, need not run again.
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
    writer: int = 0  # the last step that was planned to write it
    is_ready: bool = False  # that step has succeeded


class ImageCache:
    """Slots of the feature store.

    A step that needs an image which no finished step has written writes it itself, to the same slots. An
    image is ready once the last step that was to write it has succeeded. So what a failed step leaves in its
    slots is never read.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.hits = self.lookups = 0
        self._free: Ints = np.arange(size, dtype=np.int32)
        self._num_free = size
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._step = 0

    def begin_step(self) -> int:
        """The number of the step that is planned next; what `place` finds missing, it writes."""
        self._step += 1
        return self._step

    def check(self, request: Request) -> None:
        """`BadValue` if a row of the request has more image tokens than the store can hold."""
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
        """The slots of an image, and whether its features are there already. Images of this step, which are
        `used`, stay."""
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
        """The step has succeeded that wrote these images."""
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
