"""Content identity: the only module that decides when two rows are identical.

Deduplication, the prefix cache and the vector cache take their keys from here. The two tables below name
every `Request` field that is content, except token ids and images. Add a new content field to one of them
and to `PrefixKeys`; `tests/config/test_content.py` fails if a field of `Request` is in neither table.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import repeat
from operator import attrgetter, is_not

import numpy as np

from penstock.types import Ints, Request, RequestImages, runs

TOKEN_FIELDS = ("type_ids", "token_mask")  # one number per token, in addition to `token_ids`
ROW_FIELDS = ("skip", "key_limits", "adapters")  # one number per row

Scope = tuple[object, ...]
_optional_fields = attrgetter(*TOKEN_FIELDS, *ROW_FIELDS)


def row_keys(request: Request) -> list[bytes]:
    """One key per row. For requests with equal `scope`, equal keys mean equal results."""
    if request.num_rows == 1:
        return [_only_row_key(request)]
    ends = request.starts + request.lengths
    keys = _slices(request.token_ids, request.starts, ends)
    for name in TOKEN_FIELDS:
        if (numbers := getattr(request, name)) is not None:
            parts = _slices(numbers, request.starts, ends)
            keys = [key + part for key, part in zip(keys, parts, strict=True)]
    for name in ROW_FIELDS:
        if (numbers := getattr(request, name)) is not None:
            each = (number.to_bytes(4, "little", signed=True) for number in numbers.tolist())
            keys = [key + number for key, number in zip(keys, each, strict=True)]
    if request.images is not None:
        keys = [key + part for key, part in zip(keys, _image_keys(request), strict=True)]
    return keys


def scope(request: Request) -> Scope:
    """What two requests must share before their row keys may be compared."""
    has_images = request.images is not None
    return (request.cache_salt, has_images, *map(is_not, _optional_fields(request), repeat(None)))


def select_rows(request: Request, rows: Ints, request_id: str) -> Request:
    """A request of only these rows."""
    lengths = request.lengths[rows]
    tokens = runs(request.starts[rows], lengths)
    parts = dict.fromkeys(TOKEN_FIELDS, tokens) | dict.fromkeys(ROW_FIELDS, rows)
    selected = {
        name: numbers[index]
        for name, index in parts.items()
        if (numbers := getattr(request, name)) is not None
    }
    if request.rope_positions is not None:
        selected["rope_positions"] = request.rope_positions.reshape(-1, 3)[tokens].reshape(-1)
    if request.images is not None:
        images, row_indices = request.images.of_rows(rows)
        selected["images"] = request.images.select(images, row_indices) if len(images) else None
    return replace(request, id=request_id, token_ids=request.token_ids[tokens], lengths=lengths, **selected)


def query_key(request: Request) -> bytes:
    """One key for all queries of a request with pairs. Equal keys mean equal query vectors."""
    queries = select_rows(request, np.arange(request.num_queries, dtype=np.int32), request.id)
    digest = hashlib.blake2b(repr((request.params.late, scope(request))).encode(), digest_size=16)
    for key in row_keys(queries):
        digest.update(key)
    return digest.digest()


def prefix_keys(request: Request, block_size: int, max_blocks: int) -> list[bytes]:
    """Keys of the prefixes of a request's first row, each `block_size` tokens longer than the last."""
    first_row = request.token_ids[: min(int(request.lengths[0]), block_size * max_blocks)]
    return PrefixKeys(request, 0, block_size).extend(first_row)


class PrefixKeys:
    """Keys of the full KV cache blocks of one row, which may grow by generated tokens.

    A key covers all tokens up to the end of its block and everything else that changes their hidden states:
    type ids, images, adapter and key limit. It also covers the cache salt. Because some models attend
    differently when they generate, it covers whether the row generates or is pooled. `skip` and `token_mask`
    are left out, because they only select outputs.
    """

    __slots__ = ("_block_size", "_images", "_parent", "_type_ids", "keys")

    def __init__(self, request: Request, row: int, block_size: int) -> None:
        self.keys: list[bytes] = []
        self._block_size = block_size
        self._parent = _prefix_root(request, row)
        self._type_ids = b""
        if request.type_ids is not None:
            start = int(request.starts[row])
            self._type_ids = request.type_ids[start : start + int(request.lengths[row])].tobytes()
        self._images = [] if request.images is None else _images_of_row(request.images, row)

    def extend(self, token_ids: Ints) -> list[bytes]:
        """Add the keys of newly filled blocks and return all keys; `token_ids` are all tokens of the row."""
        width = self._block_size * token_ids.itemsize
        first = len(self.keys) * self._block_size
        tokens = token_ids[first:].tobytes()
        for at in range(0, len(tokens) - width + 1, width):
            content = self._parent + tokens[at : at + width]
            if self._type_ids:  # generated tokens have none and count as 0
                begin = len(self.keys) * width
                content += self._type_ids[begin : begin + width].ljust(width, b"\0")
            if self._images:
                first_token = len(self.keys) * self._block_size
                content += self._image_keys(first_token, first_token + self._block_size)
            self._parent = hashlib.blake2b(content, digest_size=16).digest()
            self.keys.append(self._parent)
        return self.keys

    def _image_keys(self, begin: int, end: int) -> bytes:
        """Keys of the images that overlap tokens `begin` to `end`."""
        return b"".join(key for start, stop, key in self._images if start < end and stop > begin)


def _prefix_root(request: Request, row: int) -> bytes:
    """The start of a row's chain of block keys: everything except its tokens."""
    generates = request.sampling is not None
    adapter = -1 if request.adapters is None else int(request.adapters[row])
    key_limit = 0 if request.key_limits is None else int(request.key_limits[row])
    has_types = request.type_ids is not None
    root = f"{generates:d} {adapter} {key_limit} {has_types:d} {request.cache_salt}"
    return hashlib.blake2b(root.encode(), digest_size=16).digest()


def _only_row_key(request: Request) -> bytes:
    """The key of a request's only row: all its content, in the order of `row_keys`."""
    key = request.token_ids.tobytes()
    for numbers in _optional_fields(request):
        if numbers is not None:
            key += numbers.tobytes()
    return key if request.images is None else key + _image_keys(request)[0]


def _images_of_row(images: RequestImages, row: int) -> list[tuple[int, int, bytes]]:
    """For each image of a row: its first token, one past its last token, and its key."""
    chosen, _ = images.of_rows(np.array([row], dtype=np.int32))
    starts = images.starts[chosen]
    ends = starts + images.num_tokens[chosen]
    return [
        (start, end, digest.tobytes() + start.to_bytes(4, "little"))
        for start, end, digest in zip(starts.tolist(), ends.tolist(), images.digests[chosen], strict=True)
    ]


def _image_keys(request: Request) -> list[bytes]:
    """What the images of each row add to its key. The number of images comes last, so that token ids cannot
    be mistaken for parts of an image."""
    keys, counts = [b""] * request.num_rows, [0] * request.num_rows
    if (images := request.images) is not None:
        spans = zip(images.rows.tolist(), images.starts.tolist(), images.num_tokens.tolist(), strict=True)
        for (row, start, size), digest in zip(spans, images.digests, strict=True):
            keys[row] += digest.tobytes() + start.to_bytes(4, "little") + size.to_bytes(4, "little")
            counts[row] += 1
    return [key + count.to_bytes(4, "little") for key, count in zip(keys, counts, strict=True)]


def _slices(array: Ints, starts: Ints, ends: Ints) -> list[bytes]:
    raw, size = array.tobytes(), array.itemsize
    return [
        raw[begin:end] for begin, end in zip((starts * size).tolist(), (ends * size).tolist(), strict=True)
    ]
