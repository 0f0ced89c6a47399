"""The tokenizer of the load client: makes random prompts of exact lengths and counts tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as RustTokenizer

from penstock.errors import BadValue, PenstockError


class BenchTokenizer:
    """`folder` is the model's, which also holds the chat template."""

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
        self.opening, self.closing = self._frame()

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

    def _frame(self) -> tuple[list[int], list[int]]:
        bare: list[int] = self._rust.encode("a", add_special_tokens=False).ids
        full: list[int] = self._rust.encode("a", add_special_tokens=True).ids
        extra = len(full) - len(bare)
        at = next((i for i in range(extra + 1) if full[i : i + len(bare)] == bare), extra)
        return full[:at], full[at + len(bare) :]


def load_tokenizer(tokenizer: str | None, model: str | None) -> BenchTokenizer:
    """By --tokenizer, else by --model: a tokenizer.json, a folder that has one, or a hub id.

    Without either, the embedded default model's.
    """
    wanted = tokenizer or model
    try:
        return _find(wanted)
    except PenstockError as error:
        raise BadValue(
            f"no tokenizer for {wanted or 'the default model'!r}: {error.message}; "
            "give --tokenizer a folder or a tokenizer.json",
            param="tokenizer",
        ) from None


def _find(wanted: str | None) -> BenchTokenizer:
    from penstock.checkpoint.convert import tokenizer_file
    from penstock.checkpoint.find import DEFAULT_NAME, default_folder

    path = Path(wanted).expanduser() if wanted else None
    if path is not None and path.is_file():
        return BenchTokenizer(path, path.parent)
    if path is not None and path.is_dir():
        return BenchTokenizer(tokenizer_file(path), path)
    if wanted is None or wanted == DEFAULT_NAME:
        folder = default_folder()
        return BenchTokenizer(folder / "tokenizer.json", folder)
    file = _from_hub(wanted)
    return BenchTokenizer(file, file.parent)


def _from_hub(model: str) -> Path:
    """Download only the tokenizer's files: the server loads the weights."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(model, "tokenizer.json")
        file = Path(cached) if isinstance(cached, str) else Path(hf_hub_download(model, "tokenizer.json"))
    except Exception as error:  # names that are no hub id, no network, no such repository
        raise BadValue(f"it is not a folder, and the hub raised {type(error).__name__}") from None
    with contextlib.suppress(Exception):
        hf_hub_download(model, "tokenizer_config.json")  # for its chat template; not every model has one
    return file
