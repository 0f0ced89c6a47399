"""Tokenises texts that are much longer than a row: only as far as needed, and in pieces.

Tokenising takes up to 400 bytes of memory per character, so a long text is never tokenised whole.

- **A row with a limit** needs the first or the last tokens of its text. They are those of the whole text if
  they stay the same when the part ends a little later, or begins a little earlier. The difference is a prime
  number of characters, so that groups of equal size (digits by three, `xx`) cannot hide a change. The part
  ends before a run of spaces, because a special token after it may absorb the spaces.
- **A row without a limit** needs all tokens. Its text is divided only at verified places: tokenising both
  sides separately gives the same tokens as tokenising them together.

So a row is the same as if its text had been tokenised whole, whatever the tokenizer does to spaces, accents,
unknown words or special tokens. A text for which this cannot be verified is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np

from penstock.errors import BadValue, BodyTooLarge
from penstock.inputs.truncation import Side
from penstock.types import Ints

Encode = Callable[[list[str]], list[Ints]]  # without special tokens

MAX_EXPANDED_CHARS = 32 << 20  # added to the texts of a request by prompt, instruction or query
MAX_WINDOW_CHARS = 1 << 17  # total size of texts that are tokenised at once
MAX_REQUEST_TOKENS = 16 << 20  # tokens of all rows of a request to a server
_MIN_FIRST_CHARS = 8192  # tokenised first, even if few tokens are needed
_PIECE_CHARS = 1 << 16
_MAX_UNDIVIDED_CHARS = 1 << 18  # a longer run without a place for a division is refused
_CONTEXT_CHARS = 2053  # a prime number
_SEARCH_CHARS = 4096  # range of characters to search for a place for a division
_MAX_PLACES = 6  # number of places of each kind that are tried


@dataclass(frozen=True, slots=True)
class RowLimit:
    """How many tokens of a text are used; longer texts are truncated or rejected."""

    max_tokens: int  # special tokens included
    truncates: bool = False
    side: Side = "right"
    name: str = "input"  # name of a text in errors
    param: str = "input"  # field in errors

    @property
    def max_whole_chars(self) -> int:
        """Maximum characters of a text that is tokenised whole. Nearly all texts that fit are shorter."""
        return 4 * self.max_tokens + 2 * _MIN_FIRST_CHARS

    @property
    def max_scanned_chars(self) -> int:
        """Maximum characters of a text that are tokenised to find enough tokens."""
        return max(_MAX_UNDIVIDED_CHARS, 2 * self.max_whole_chars)

    def reject_long(self, rows: Sequence[Ints], first: int) -> None:
        """Reject rows that are too long. `first` is the index of `rows[0]` in the request."""
        for index, row in enumerate(rows, first):
            if len(row) > self.max_tokens:
                raise self.too_long(index, f"{len(row)}")

    def too_long(self, index: int, count: str) -> BadValue:
        return BadValue(
            f"{self.name} {index} has {count} tokens, but the model takes at most {self.max_tokens}; shorten "
            "it or set truncate_prompt_tokens to -1",
            param=self.param,
        )


class Piece(NamedTuple):
    """A part of a text, with the same tokens as in the whole text."""

    start: int  # characters
    end: int
    ids: Ints


def needed_pieces(encode: Encode, text: str, limit: RowLimit | None, index: int) -> list[Piece]:
    """The pieces of a text for its row: all of them, or one piece with more tokens than the limit."""
    if limit is None:
        return list(_pieces(encode, text, index))
    found = _first_or_last_tokens(encode, text, limit)
    if found is None and len(text) <= limit.max_scanned_chars:
        return [Piece(0, len(text), *encode([text]))]
    if found is None:
        raise BadValue(
            f"{limit.name} {index} has {len(text)} characters, but {limit.max_scanned_chars} of them do not "
            "determine the tokens that are needed; shorten it or use spaces between words",
            param=limit.param,
        )
    if not limit.truncates:
        raise limit.too_long(index, f"more than {limit.max_tokens}")
    return [found]


def _first_or_last_tokens(encode: Encode, text: str, limit: RowLimit) -> Piece | None:
    """A part at one end of the text with more tokens than the limit; None if none was found."""
    size, count = 2 * limit.max_tokens + _MIN_FIRST_CHARS, limit.max_tokens + 1
    while size <= min(limit.max_scanned_chars, len(text) - _CONTEXT_CHARS):
        if limit.side == "right" or not limit.truncates:
            end = len(text[:size].rstrip())
            (ids,) = encode([text[:end]])
            if len(ids) >= count:
                (longer,) = encode([text[: end + _CONTEXT_CHARS]])
                if np.array_equal(ids[:count], longer[:count]):
                    return Piece(0, end, ids)
        else:
            start = len(text) - len(text[len(text) - size :].lstrip())
            (ids,) = encode([text[start:]])
            if len(ids) >= count:
                (longer,) = encode([text[max(0, start - _CONTEXT_CHARS) :]])
                if np.array_equal(ids[-count:], longer[-count:]):
                    return Piece(start, len(text), ids)
        size *= 2
    return None


def _pieces(encode: Encode, text: str, index: int) -> Iterator[Piece]:
    """The whole text in pieces."""
    start = 0
    while len(text) - start > _PIECE_CHARS + _CONTEXT_CHARS:
        found = _next_piece(encode, text, start)
        if found is None:
            raise BadValue(
                f"input {index} has {len(text)} characters and cannot be divided within "
                f"{_MAX_UNDIVIDED_CHARS} of them; shorten it or use spaces between words",
                param="input",
            )
        piece, start = found
        yield piece
    if start < len(text):
        yield Piece(start, len(text), *encode([text[start:]]))


def _next_piece(encode: Encode, text: str, start: int) -> tuple[Piece, int] | None:
    """The next piece, and the index at which the text continues after it."""
    size = _PIECE_CHARS
    while size <= _MAX_UNDIVIDED_CHARS and start + size + _CONTEXT_CHARS < len(text):
        for end, begin in _places(text, start, start + size):
            after = text[begin : begin + _CONTEXT_CHARS]
            left, right, both = encode([text[start:end], after, text[start : begin + len(after)]])
            if np.array_equal(both, np.concatenate([left, right])):
                return Piece(start, end, left), begin
        size *= 2
    if len(text) - start > _MAX_UNDIVIDED_CHARS:
        return None
    return Piece(start, len(text), *encode([text[start:]])), len(text)


def _places(text: str, start: int, near: int) -> Iterator[tuple[int, int]]:
    """Places to divide the text before `near`, best first: the end of the left side, the start of the right.

    No place is next to a run of spaces, or between digits, which some tokenizers group from the end. A single
    space belongs to the right side, or to neither side, for tokenizers that prepend a space to a text.
    """
    window = range(near, max(start + 1, near - _SEARCH_CHARS), -1)
    spaces = (at for at in window if text[at] in " \n" and _is_single(text, at))
    for at in itertools.islice(spaces, _MAX_PLACES):
        yield at, at
        if text[at] == " ":
            yield at, at + 1
    unspaced = (at for at in window if _is_unspaced(text[at]) and _is_unspaced(text[at - 1]))
    words = (at for at in window if text[at].isalpha() and not text[at - 1].isalnum() and text[at - 1] != " ")
    letters = (at for at in window if text[at].isalpha() and text[at - 1].isalpha())
    for places in (unspaced, words, letters):
        yield from ((at, at) for at in itertools.islice(places, _MAX_PLACES))


def _is_single(text: str, at: int) -> bool:
    """Whether the space at this index has no space beside it."""
    return at + 1 < len(text) and not text[at - 1].isspace() and not text[at + 1].isspace()


def _is_unspaced(char: str) -> bool:
    """Whether the character is a letter of a script without spaces, such as Chinese or Thai."""
    return char >= "\u0e00" and char.isalpha()


def windows(texts: Iterable[str], max_chars: int = MAX_WINDOW_CHARS) -> Iterator[list[str]]:
    """Group texts into lists of at most `max_chars` characters; a longer text gets its own list."""
    window: list[str] = []
    size = 0
    for text in texts:
        if window and size + len(text) > max_chars:
            yield window
            window, size = [], 0
        window.append(text)
        size += len(text)
    if window:
        yield window


class ExpandedTexts(Sequence[str]):
    """Texts that are combined with another text, such as a prompt, only when they are read."""

    def __init__(self, expand: Callable[[int], str], sizes: Sequence[int]) -> None:
        """`expand(index)` gives a text of at most `sizes[index]` characters."""
        self._expand = expand
        self._length = len(sizes)
        self.num_chars = sum(sizes)
        self.max_chars = max(sizes, default=0)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._expand(at) for at in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._expand(index % len(self))


def num_chars(texts: Sequence[str]) -> int:
    if type(texts) is list:  # nearly always
        return len(texts[0]) if len(texts) == 1 else sum(map(len, texts))
    return texts.num_chars if isinstance(texts, ExpandedTexts) else sum(map(len, texts))


def max_chars(texts: Sequence[str]) -> int:
    return texts.max_chars if isinstance(texts, ExpandedTexts) else max(map(len, texts), default=0)


def check_expanded(size: int, param: str) -> None:
    """Refuse a prompt or query that takes too many characters once it is repeated for each text."""
    if size > MAX_EXPANDED_CHARS:
        raise BodyTooLarge(
            f"{param} adds {size} characters, repeated for each text; one request takes at most "
            f"{MAX_EXPANDED_CHARS}; shorten it or send fewer texts at a time",
            param=param,
        )


def check_request_tokens(num_tokens: int, max_tokens: int | None, param: str) -> None:
    if max_tokens is not None and num_tokens > max_tokens:
        raise BodyTooLarge(
            f"the rows have {num_tokens} tokens together; one request takes at most {max_tokens}; send fewer "
            "texts at a time",
            param=param,
        )
