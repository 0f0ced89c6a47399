"""Images on the device: the patches that a vision tower runs, and the tokens that take its features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.types import Ints, LengthGroup


@dataclass(frozen=True, slots=True, eq=False)
class ImageBatch:
    """The images that the tower runs in a step, ragged: fewest patches first."""

    patches: Tensor  # uint8 [patches, values]
    grids: Ints  # [images, 2], patches down and across; on the host
    cu_patches: Tensor  # int32 [images + 1]
    groups: tuple[LengthGroup, ...]  # images of equal numbers of patches
    max_patches: int  # of one image
    layout: tuple[Tensor, ...] = ()  # what `VisionTower.layout` gave for these grids

    @property
    def num_images(self) -> int:
        return len(self.grids)


@dataclass(frozen=True, slots=True, eq=False)
class ImageTokens:
    """The image tokens of a step, with their features."""

    tokens: Tensor  # int32 [image tokens], tokens of the step, ascending
    features: Tensor  # [image tokens, feature width]
    num_text_rows: int | None = None  # where images are rows: rows before them

    def embed(self, embedded: Tensor) -> Tensor:
        """Put the features in the place of the embeddings [tokens, hidden] of their tokens. Columns beyond
        the hidden size belong to later layers."""
        features = self.features[:, : embedded.shape[1]].to(embedded.dtype)
        return embedded.index_copy_(0, self.tokens.long(), features)

    def levels(self, width: int) -> tuple[Tensor, ...]:
        """The columns beyond the hidden size, [image tokens, width] each: what the first layers add to their
        output, one level each."""
        return tuple(self.features.split(width, dim=1)[1:])


class VisionTower(Protocol):
    """Turns patches into features, one row for each token that stands for an image.

    A tower that feeds several layers of the text model gives them as further columns, level after level.
    """

    feature_width: int

    def layout(self, grids: Ints) -> list[Ints]:
        """Every further integer that the tower needs for these images, such as positions of patches or
        windows of attention. Runs on the host; the arrays travel with the step's other integers."""
        ...

    def __call__(self, images: ImageBatch) -> Tensor:
        """[image tokens, feature width], the images one after another."""
        ...
