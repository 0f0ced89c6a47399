"""Fields that the bodies of several routes share, and their engine parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from penstock.errors import BadValue
from penstock.inputs.chunks import Chunking, ChunkOptions
from penstock.inputs.processor import DEFAULT_OPTIONS, InputOptions
from penstock.outputs.encoders import EncodingFormat, Endianness
from penstock.types import OutputDtype, PoolingParams, Task


@dataclass(frozen=True, slots=True)
class NoEffect:
    """Annotates a field that is accepted but has no effect, with the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Annotates a field for which only the default and values in `accepts` are accepted, with the reason."""

    reason: str
    accepts: tuple[Any, ...] = (None,)


User = Annotated[str | None, NoEffect("the server does not distinguish users")]
MediaOptions = Annotated[
    dict[str, Any] | None,
    Refused("images are read as the model's files and the server's flags say", accepts=(None, {})),
]
CacheSalt = Annotated[str, msgspec.Meta(max_length=1024)]  # the engine keeps it as long as its cache entries


class RequestFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The model, and the scheduling of the request. These fields mean the same on every route."""

    model: str | None = None
    adapter: str | None = None
    priority: int = 0
    timeout: float | None = None
    request_id: str | None = None
    user: User = None


class InputFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The inputs, how rows are made from them, and when they run."""

    takes_own_adapter: ClassVar[bool] = True  # `adapter` may name one of the checkpoint's own adapters
    input: str | list[str | int | list[int]]
    model: str | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "right"
    prompt_name: str | None = None
    prompt: str | None = None
    instruction: str | None = None
    input_type: str | None = None
    priority: int = 0
    timeout: float | None = None
    request_id: str | None = None
    user: User = None
    cache_salt: CacheSalt = ""
    adapter: str | None = None

    def options(self) -> InputOptions:
        given = _option_values(self)
        if given == _DEFAULT_VALUES:
            return DEFAULT_OPTIONS
        if given[_NUM_TRUNCATION_OPTIONS:] == _DEFAULT_VALUES[_NUM_TRUNCATION_OPTIONS:]:
            return _truncation_options(given[:_NUM_TRUNCATION_OPTIONS])
        return InputOptions(**dict(zip(_OPTIONS, given, strict=True)))


_OPTIONS = tuple(InputOptions.__dataclass_fields__)  # each is a field of the body under the same name
_option_values = attrgetter(*_OPTIONS)
_DEFAULT_VALUES = _option_values(DEFAULT_OPTIONS)  # the values of most requests
# The first options are about truncation. Most requests that set any option set only these.
_NUM_TRUNCATION_OPTIONS = 1 + _OPTIONS.index("truncation_side")


@lru_cache(maxsize=256)
def _truncation_options(given: tuple[Any, ...]) -> InputOptions:
    """The options of a request that sets only truncation options."""
    return InputOptions(**dict(zip(_OPTIONS, given, strict=False)))


class VectorFields(InputFields, kw_only=True):
    """How values are returned."""

    encoding_format: EncodingFormat = "float"
    dimensions: int | None = None
    embed_dtype: OutputDtype = OutputDtype.FLOAT32
    endianness: Endianness = "native"
    normalize: bool | None = None
    use_activation: bool | None = None

    @property
    def wants_bytes(self) -> bool:
        """Whether the answer is the values alone, not JSON."""
        return self.encoding_format in ("bytes", "bytes_only")

    def params(self, task: Task) -> PoolingParams:
        normalize = self.normalize
        if self.use_activation is not None:
            normalize = agreed(normalize, self.use_activation)
        return PoolingParams(task, self.dimensions, normalize, self.embed_dtype)


class ChunkFields(VectorFields, kw_only=True):
    """How long texts are chunked: `mean` gives one vector per text, `late` also one per chunk."""

    chunking: Chunking | None = None  # None: as --default-chunking says
    chunk_size: int | None = None
    chunk_spans: list[list[tuple[int, int]]] | None = None

    @property
    def wants_chunks(self) -> bool:
        """Whether any chunking field is set; the options themselves are checked by the task."""
        return (
            self.chunk_size is not None
            or self.chunk_spans is not None
            or (self.chunking is not None and self.chunking != "none")
        )

    @property
    def is_chunked(self) -> bool:
        return self.chunking is not None and self.chunking != "none"

    def chunk_options(self) -> ChunkOptions:
        return ChunkOptions(
            chunking=self.chunking or "none", chunk_size=self.chunk_size, chunk_spans=self.chunk_spans
        )


def agreed(normalize: bool | None, use_activation: bool | None) -> bool | None:
    """`normalize` and `use_activation` mean the same; they must agree."""
    if normalize is not None and use_activation is not None and normalize != use_activation:
        raise BadValue("normalize and use_activation contradict each other", param="use_activation")
    return normalize if normalize is not None else use_activation
