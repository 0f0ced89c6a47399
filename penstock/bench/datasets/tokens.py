"""The tokenizer of the load client: makes random prompts of exact lengths and counts tokens.

It is a file that the client reads, or the tokenizer of the server (`penstock.bench.server_tokenizer`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as RustTokenizer

from penstock.bench.datasets.chat import tokenizer_config
from penstock.errors import BadValue, PenstockError

TokenIds = list[int]


class PromptTokenizer(Protocol):
    """The interface of a tokenizer that makes prompts and counts tokens."""

    opening: TokenIds  # special tokens before a text
    closing: TokenIds  # special tokens after a text

    @property
    def ordinary(self) -> NDArray[np.int64]:
        """Ids that are not special."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_special(self) -> int: ...

    def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[TokenIds]: ...

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]: ...

    def config(self) -> dict[str, Any]:
        """The tokenizer's configuration, which may hold a chat template; empty if there is none."""
        ...


def frame_of(bare: TokenIds, full: TokenIds) -> tuple[TokenIds, TokenIds]:
    """Special tokens before and after a text, from its ids without (`bare`) and with them (`full`)."""
    extra = len(full) - len(bare)
    at = next((i for i in range(extra + 1) if full[i : i + len(bare)] == bare), extra)
    return full[:at], full[at + len(bare) :]


class BenchTokenizer:
    """A tokenizer.json. `folder` is the model's folder, which also holds the chat template."""

    def __init__(self, file: Path, folder: Path) -> None:
        try:
            self._rust = RustTokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise BadValue(f"{file} is not a tokenizer: {error}", param="tokenizer") from None
        self._rust.no_truncation()
        self._rust.no_padding()
        self.folder = folder
        self.vocab_size: int = self._rust.get_vocab_size(with_added_tokens=False)
        special = [i for i, token in self._rust.get_added_tokens_decoder().items() if token.special]
        self.ordinary: NDArray[np.int64] = np.setdiff1d(np.arange(self.vocab_size), special)
        self.opening, self.closing = frame_of(*(self.encode(["a"], special)[0] for special in (False, True)))

    @property
    def num_special(self) -> int:
        """Special tokens that the template adds to a text."""
        return len(self.opening) + len(self.closing)

    def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        encoded = self._rust.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encoded]

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        texts: list[str] = self._rust.decode_batch([list(row) for row in rows], skip_special_tokens=False)
        return texts

    def config(self) -> dict[str, Any]:
        return tokenizer_config(self.folder)


def is_local(name: str | None) -> bool:
    """Whether a name is a folder or a file of this machine."""
    return name is not None and Path(name).expanduser().exists()


def load_tokenizer(name: str | None, *, asks_hub: bool = True) -> BenchTokenizer:
    """Load the tokenizer of a file, a folder or a hub id. The hub is contacted only if `asks_hub`.

    Without a name, load the tokenizer of the embedded default model.
    """
    try:
        return _find(name, asks_hub)
    except PenstockError as error:
        raise BadValue(
            f"no tokenizer for {name or 'the default model'!r}: {error.message}; "
            "give --tokenizer a folder or a tokenizer.json",
            param="tokenizer",
        ) from None


def _find(name: str | None, asks_hub: bool) -> BenchTokenizer:
    from penstock.checkpoint.convert import tokenizer_file
    from penstock.checkpoint.find import DEFAULT_NAME, default_folder

    path = Path(name).expanduser() if name else None
    if path is not None and path.is_file():
        return BenchTokenizer(path, path.parent)
    if path is not None and path.is_dir():
        return BenchTokenizer(tokenizer_file(path), path)
    if name is None or name == DEFAULT_NAME:
        folder = default_folder()
        return BenchTokenizer(folder / "tokenizer.json", folder)
    file = _from_hub(name) if asks_hub else _from_cache(name)
    return BenchTokenizer(file, file.parent)


def _from_cache(model: str) -> Path:
    from huggingface_hub import try_to_load_from_cache

    with contextlib.suppress(Exception):  # the name is no hub id
        if isinstance(cached := try_to_load_from_cache(model, "tokenizer.json"), str):
            return Path(cached)
    raise BadValue("it is not a folder")


def _from_hub(model: str) -> Path:
    """Download only the tokenizer's files: the server loads the weights."""
    from huggingface_hub import hf_hub_download

    with contextlib.suppress(BadValue):
        return _from_cache(model)
    try:
        file = Path(hf_hub_download(model, "tokenizer.json"))
    except Exception as error:  # the name is no hub id, there is no network, or no such repository
        raise BadValue(f"it is not a folder, and the hub raised {type(error).__name__}") from None
    with contextlib.suppress(Exception):
        hf_hub_download(model, "tokenizer_config.json")  # for its chat template; not every model has one
    return file
