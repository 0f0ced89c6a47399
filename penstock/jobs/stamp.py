"""`Stamp`: which model made a set of vectors, and with which settings.

It is stored beside the vectors. Vectors with different stamps must not be compared, so a store or a file
that holds one stamp refuses rows with another.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock import __version__
from penstock.errors import BadValue

METADATA_KEY = b"penstock"  # of a table's schema


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides what a text's vectors are. Two stamps without a difference may be mixed."""

    model: str  # as the user named it; another name for the same files makes no difference
    revision: str = ""  # hash of the content of the model's files; "" if they could not be read
    kinds: tuple[str, ...] = ("dense",)  # of dense, sparse, multi-vector
    dimension: int | None = None  # of dense vectors and token vectors; None: the vectors are sparse
    dtype: str = "float32"  # number format of the vectors, not of the computation
    prompt: str = ""  # precedes every text
    normalize: bool | None = None  # None: as the model says
    truncation: str = "right"  # which end of a long text was cut, or "none": long texts were refused
    max_tokens: int | None = None  # longer texts were cut or refused
    similarity: str = "cosine"  # how the model's vectors are compared
    adapter: str = ""  # name of the adapter, and of a LoRA adapter the hash of its content: NAME@HASH
    overrides: dict[str, Any] = {}  # settings that change the model: pooler_config, quantization, …
    version: str = __version__  # of Penstock; makes no difference

    def difference(self, other: Stamp) -> str:
        """What differs, in words, first of this stamp and then of the other; "" if nothing does."""
        names = [name for name in self.__struct_fields__ if name not in ("model", "revision", "version")]
        differences = [
            f"{name} is {_shown(mine)} and {_shown(theirs)}"
            for name in names
            if (mine := getattr(self, name)) != (theirs := getattr(other, name))
        ]
        return "; ".join([*self._model_difference(other), *differences])

    def _model_difference(self, other: Stamp) -> list[str]:
        if self.revision and other.revision:
            if self.revision == other.revision:
                return []
            if self.model == other.model:
                return [f"model {self.model} has the revisions {self.revision} and {other.revision}"]
        return [] if self.model == other.model else [f"model is {self.model} and {other.model}"]

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Stamp:
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise BadValue(f"the stamp of these vectors is damaged: {error}") from None

    @property
    def metadata(self) -> dict[bytes, bytes]:
        """Metadata of the schema of a table with these vectors."""
        return {METADATA_KEY: self.to_json().encode()}

    @classmethod
    def of_schema(cls, schema: Any) -> Stamp | None:
        """The stamp of an Arrow schema; None if it has none."""
        text = (schema.metadata or {}).get(METADATA_KEY)
        return None if text is None else cls.from_json(text)


def _shown(value: Any) -> str:
    return "none" if value is None else msgspec.json.encode(value).decode()
