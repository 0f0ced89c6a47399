"""`Stamp`: the model and settings that produced a set of vectors.

It is stored with the vectors. Vectors with different stamps must not be compared, so a store or file with one
stamp refuses rows with another.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock import __version__
from penstock.errors import BadValue

METADATA_KEY = b"penstock"  # key in the metadata of a table's schema


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that determines a text's vectors. Vectors may be mixed if their stamps do not differ."""

    model: str  # as named by the user; ignored if the revisions are equal
    revision: str = ""  # hash of the content of the model's files; "" if they could not be read
    kinds: tuple[str, ...] = ("dense",)  # any of dense, sparse, multi-vector
    dimension: int | None = None  # dimension of dense and token vectors; None: only sparse vectors
    dtype: str = "float32"  # number format of the vectors, not of the computation
    prompt: str = ""  # prepended to every text
    normalize: bool | None = None  # None: the model's default
    truncation: str = "right"  # which end of long texts was cut; "none": long texts were refused
    max_tokens: int | None = None  # longer texts were cut or refused
    similarity: str = "cosine"  # how the model's vectors are compared
    adapter: str = ""  # name of the adapter; for a LoRA adapter NAME@HASH, with the hash of its content
    overrides: dict[str, Any] = {}  # settings that change the model: pooler_config, quantization, …
    version: str = __version__  # Penstock's version; not compared

    def difference(self, other: Stamp) -> str:
        """Describe what differs: values of this stamp first, then of the other. "" if nothing differs."""
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
        """Schema metadata for a table with these vectors."""
        return {METADATA_KEY: self.to_json().encode()}

    @classmethod
    def of_schema(cls, schema: Any) -> Stamp | None:
        """Read the stamp of an Arrow schema; None if it has none."""
        text = (schema.metadata or {}).get(METADATA_KEY)
        return None if text is None else cls.from_json(text)


def _shown(value: Any) -> str:
    return "none" if value is None else msgspec.json.encode(value).decode()
