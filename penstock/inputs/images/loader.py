"""Prepares the images of requests on threads, so that no event loop waits for a decoder.

Memory is bounded by limits on the pixels decoded at a time and on the prepared images that requests hold.
Images with the same bytes are prepared once, while they are cached.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from penstock.checkpoint.image_processor import ImageProcessorSpec
from penstock.config import ServerConfig, available_cpus
from penstock.errors import BadValue, ServerFull, shown
from penstock.inputs.images.decode import ImageLimits, from_array, from_pillow, load, open_image
from penstock.inputs.images.fetch import MediaDomains
from penstock.inputs.images.preprocess import prepare
from penstock.inputs.images.sources import FileReader, ImageSources
from penstock.types import PreparedImage

# Images from Python callers. A `str` is a source for `ImageSources`, a `Path` one of the caller's files.
ImageInput = str | bytes | Path | Image.Image | NDArray[np.uint8]
_MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True)
class LoaderLimits:
    """Limits for all requests of one process together."""

    num_threads: int = 2  # threads that decode
    num_fetches: int = 8  # concurrent fetches from URLs
    max_pixels: int = 100_000_000  # decoded at a time; a larger image is decoded alone
    max_request_bytes: int = 512 * _MEGABYTE  # prepared images of one request
    max_held_bytes: int = 2048 * _MEGABYTE  # prepared images of all requests
    cache_bytes: int = 128 * _MEGABYTE


@dataclass(slots=True)
class ImageLoader:
    """Turns images that clients name or send into prepared images."""

    sources: ImageSources = field(default_factory=ImageSources)
    limits: LoaderLimits = field(default_factory=LoaderLimits)
    _cache: _PreparedCache = field(init=False)
    _gate: _PixelGate = field(init=False)
    _held: _HeldBytes = field(init=False)
    _decoders: ThreadPoolExecutor = field(init=False)
    _fetchers: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._cache = _PreparedCache(self.limits.cache_bytes)
        self._gate = _PixelGate(self.limits.max_pixels)
        self._held = _HeldBytes(self.limits.max_held_bytes)
        # Threads start with the first image, so a server without image models has none.
        self._decoders = ThreadPoolExecutor(self.limits.num_threads, thread_name_prefix="image")
        self._fetchers = ThreadPoolExecutor(self.limits.num_fetches, thread_name_prefix="image-fetch")

    async def prepare(
        self,
        images: Sequence[ImageInput],
        spec: ImageProcessorSpec,
        uploaded: FileReader | None = None,
        *,
        param: str | None = None,
    ) -> list[PreparedImage]:
        """Prepare images in the given order. An error about an image has `param` and the image's index."""
        loop, room = asyncio.get_running_loop(), _RequestBytes(self.limits.max_request_bytes)

        async def one(index: int, image: ImageInput) -> PreparedImage:
            try:
                if isinstance(image, str) and image[:5].lower() in ("http:", "https"):
                    image = await loop.run_in_executor(self._fetchers, self.sources.read, image, uploaded)
                return await loop.run_in_executor(self._decoders, self._one, image, spec, uploaded, room)
            except BadValue as error:
                raise _about(error, index, len(images), param) from None

        tasks = [asyncio.ensure_future(one(index, image)) for index, image in enumerate(images)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            while tasks:
                # Cancel the rest if one fails or the caller is cancelled. The list must end up empty: an
                # error holds this frame, so a task that holds the error would keep the request's images in
                # memory until the garbage collector finds the cycle.
                tasks.pop().cancel()

    def prepare_now(
        self, images: Sequence[ImageInput], spec: ImageProcessorSpec, uploaded: FileReader | None = None
    ) -> list[PreparedImage]:
        """The same on the caller's thread, one image at a time."""
        room = _RequestBytes(self.limits.max_request_bytes)
        return [self._one(image, spec, uploaded, room) for image in images]

    def close(self) -> None:
        self._decoders.shutdown(wait=False, cancel_futures=True)
        self._fetchers.shutdown(wait=False, cancel_futures=True)

    def _one(
        self, image: ImageInput, spec: ImageProcessorSpec, uploaded: FileReader | None, room: _RequestBytes
    ) -> PreparedImage:
        if isinstance(image, str):
            image = self.sources.read(image, uploaded)
        elif isinstance(image, Path):
            image = self.sources.read_path(image)
        if isinstance(image, bytes):
            key = hashlib.blake2b(image, digest_size=16).digest(), spec
            prepared = self._cache.get(key)
            if prepared is None:
                prepared = self._decode(image, spec)
                self._cache.put(key, prepared)
        elif isinstance(image, Image.Image):
            prepared = prepare(from_pillow(image, self.sources.limits), spec)
        elif isinstance(image, np.ndarray):
            prepared = prepare(from_array(image, self.sources.limits), spec)
        else:
            raise BadValue(
                f"an image is of type {type(image).__name__}; use a path, bytes, a Pillow image, an array of "
                "uint8, or a text with a data URI"
            )
        room.add(prepared.patches.nbytes)
        self._held.add(prepared.patches)
        return prepared

    def _decode(self, data: bytes, spec: ImageProcessorSpec) -> PreparedImage:
        opened = open_image(data, self.sources.limits)
        with self._gate.pixels(opened.width * opened.height):
            return prepare(load(opened), spec)


def _about(error: BadValue, index: int, count: int, param: str | None) -> BadValue:
    """The error with the index of its image."""
    words = error.message if count == 1 else f"image {index}: {error.message}"
    return type(error)(words, param=error.param or param)


class _PixelGate:
    """Delays decoders so that all of them together decode at most `max_pixels` at a time."""

    def __init__(self, max_pixels: int) -> None:
        self._max_pixels = max_pixels
        self._pixels = 0
        self._changed = threading.Condition()

    @contextmanager
    def pixels(self, count: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._pixels or self._pixels + count <= self._max_pixels)
            self._pixels += count
        try:
            yield
        finally:
            with self._changed:
                self._pixels -= count
                self._changed.notify_all()


class _RequestBytes:
    """Limits the bytes of prepared images of one request."""

    def __init__(self, max_bytes: int) -> None:
        self._left = self._max_bytes = max_bytes
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._left -= num_bytes
            if self._left < 0:
                raise BadValue(
                    f"the images of one request have more than {self._max_bytes:,} bytes once prepared; send "
                    "fewer images in one request"
                )


class _HeldBytes:
    """Limits the bytes of prepared images that are still referenced."""

    def __init__(self, max_bytes: int) -> None:
        self._held, self._max_bytes = 0, max_bytes
        self._known: set[int] = set()
        self._lock = threading.RLock()  # reentrant, because a finalizer may run while it is held

    def add(self, patches: NDArray[np.uint8]) -> None:
        """Count an array once, even if several requests share it."""
        with self._lock:
            if id(patches) in self._known:
                return
            if self._held + patches.nbytes > self._max_bytes:
                raise ServerFull("the server holds as many images as it may; try again in a moment")
            self._held += patches.nbytes
            self._known.add(id(patches))
            weakref.finalize(patches, self._release, id(patches), patches.nbytes)

    def _release(self, name: int, num_bytes: int) -> None:
        with self._lock:
            self._known.discard(name)
            self._held -= num_bytes


_CacheKey = tuple[bytes, ImageProcessorSpec]  # digest of a file's bytes, and the processor that prepares them


class _PreparedCache:
    """An LRU cache of prepared images, by the bytes of their files."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._left = max_bytes
        self._images: OrderedDict[_CacheKey, PreparedImage] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: _CacheKey) -> PreparedImage | None:
        with self._lock:
            if (image := self._images.get(key)) is not None:
                self._images.move_to_end(key)
            return image

    def put(self, key: _CacheKey, image: PreparedImage) -> None:
        with self._lock:
            if key in self._images or image.patches.nbytes > self._max_bytes:
                return
            self._images[key] = image
            self._left -= image.patches.nbytes
            while self._left < 0:
                _, oldest = self._images.popitem(last=False)
                self._left += oldest.patches.nbytes


def image_loader(config: ServerConfig) -> ImageLoader:
    """The loader of a server's images, within the limits of its flags."""
    folder = config.allowed_local_media_path
    limits = ImageLimits(int(config.max_image_mb * _MEGABYTE), config.max_image_pixels)
    domains = MediaDomains(config.allowed_media_domains)
    # Decoding and resizing take tens of milliseconds without the GIL, so they can use the spare cores.
    threads = max(2, min(16, available_cpus() // (config.api_server_count + 1)))
    sources = ImageSources(limits, domains, None if folder is None else Path(folder))
    return ImageLoader(sources, LoaderLimits(num_threads=threads))


def check_count(count: int, limit: int, param: str | None = None) -> None:
    """Raise `BadValue` if one input has more images than --limit-mm-per-prompt allows."""
    if count > limit:
        raise BadValue(
            f"an input has {count} images; the server accepts {shown(limit)} (--limit-mm-per-prompt)",
            param=param,
        )
