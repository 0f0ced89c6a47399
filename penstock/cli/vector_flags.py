"""Flags of commands that embed texts: which vectors to compute, and from which part of a text."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from penstock.jobs.formats import VectorKind

if TYPE_CHECKING:
    from penstock.jobs.embedder import VectorOptions


class EmbedDtype(enum.StrEnum):
    """The values of `penstock.types.OutputDtype`, without its import of NumPy."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    UINT8 = "uint8"
    BINARY = "binary"
    UBINARY = "ubinary"


class Side(enum.StrEnum):
    LEFT = "left"
    RIGHT = "right"


_VECTORS = "Vectors"


class VectorFlags(msgspec.Struct, frozen=True, kw_only=True):
    vectors: Annotated[
        list[VectorKind],
        typer.Option(
            help="Kind of vectors to compute. Repeat the flag for several at once.",
            show_default="dense",
            rich_help_panel=_VECTORS,
        ),
    ] = []
    dimensions: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Keep the first N numbers of each vector, and normalise again.",
            show_default="all",
            rich_help_panel=_VECTORS,
        ),
    ] = None
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            help="Scale vectors to length 1.",
            show_default="as the model says",
            rich_help_panel=_VECTORS,
        ),
    ] = None
    embed_dtype: Annotated[
        EmbedDtype, typer.Option(help="Number format of the vectors.", rich_help_panel=_VECTORS)
    ] = EmbedDtype.FLOAT32
    prompt_name: Annotated[
        str | None,
        typer.Option(
            help="One of the model's own prompts to put before each text; penstock info lists them.",
            rich_help_panel=_VECTORS,
        ),
    ] = None
    prompt: Annotated[
        str | None,
        typer.Option(help="Words to put before each text, such as 'passage: '.", rich_help_panel=_VECTORS),
    ] = None
    truncate: Annotated[
        bool,
        typer.Option(
            "--truncate/--no-truncate",
            help="Truncate texts at the model's limit, or treat longer ones as bad rows.",
            rich_help_panel=_VECTORS,
        ),
    ] = True
    truncation_side: Annotated[
        Side, typer.Option(help="End of the text to truncate.", rich_help_panel=_VECTORS)
    ] = Side.RIGHT

    def options(self) -> VectorOptions:
        from penstock.jobs.embedder import VectorOptions
        from penstock.types import OutputDtype

        return VectorOptions(
            kinds=tuple(dict.fromkeys(self.vectors)) or (VectorKind.DENSE,),
            dimensions=self.dimensions,
            normalize=self.normalize,
            dtype=OutputDtype(self.embed_dtype),
            prompt_name=self.prompt_name,
            prompt=self.prompt,
            truncate=self.truncate,
            truncation_side=self.truncation_side.value,
        )
