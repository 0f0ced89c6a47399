"""Images on the device: patches that a vision tower runs, and tokens that read its features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.types import Ints, LengthGroup


@dataclass(frozen=True, slots=True, eq=False)
class ImageBatch:
    """The images that the tower runs in a step, as a ragged batch ordered by number of patches."""

    patches: Tensor  # uint8 [patches, values]
    grids: Ints  # [images, 2], patches down and across; on the host
    cu_patches: Tensor  # int32 [images + 1]
    groups: tuple[LengthGroup, ...]  # images with equal numbers of patches
    max_patches: int  # patches of the largest image
    layout: tuple[Tensor, ...] = ()  # result of `VisionTower.layout` for these grids

    @property
    def num_images(self) -> int:
        return len(self.grids)


@dataclass(frozen=True, slots=True, eq=False)
class ImageTokens:
    """The image tokens of a step, with their features."""

    tokens: Tensor  # int32 [image tokens], tokens of the step, ascending
    features: Tensor  # [image tokens, feature width]
    num_text_rows: int | None = None  # in models whose images are rows: number of rows before them

    def embed(self, embedded: Tensor) -> Tensor:
        """Replace the embeddings [tokens, hidden] of image tokens by their features.

        Columns beyond the hidden size belong to later layers.
        """
        features = self.features[:, : embedded.shape[1]].to(embedded.dtype)
        return embedded.index_copy_(0, self.tokens.long(), features)

    def levels(self, width: int) -> tuple[Tensor, ...]:
        """The columns beyond the hidden size, [image tokens, width] each.

        Each of the first layers adds one level to its output.
        """
        return tuple(self.features.split(width, dim=1)[1:])


class VisionTower(Protocol):
    """Computes the features of image tokens from patches, one row for each token.

    A tower that feeds several layers of the text model returns further columns, one level after another.
    """

    feature_width: int

    def layout(self, grids: Ints) -> list[Ints]:
        """Compute all further integers that the tower needs for these images, such as positions of patches or
        attention windows. Runs on the host; the arrays are sent with the step's other integers."""
        ...

    def __call__(self, images: ImageBatch) -> Tensor:
        """Return features of all images in order, [image tokens, feature width]."""
        ...
