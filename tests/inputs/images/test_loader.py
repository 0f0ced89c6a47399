"""Images of requests are prepared on threads, once each, in order, and within memory limits."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from penstock.checkpoint.image_processor import FixedSize, ImageProcessorSpec, MaxPatches
from penstock.errors import BadValue, ServerFull
from penstock.inputs.images import loader as module
from penstock.inputs.images.loader import ImageLoader, LoaderLimits, check_count
from tests.inputs.images.pictures import encoded, noise

SPEC = ImageProcessorSpec(geometry=FixedSize(size=(32, 32), resize=(32, 32)), patch_size=16, resample=2)
BYTES = 32 * 32 * 3  # per prepared image


def test_every_kind_of_input_gives_the_same_image(tmp_path: Path) -> None:
    image = noise(40, 30)
    (tmp_path / "a.png").write_bytes(encoded(image))
    given = [encoded(image), tmp_path / "a.png", image, np.asarray(image), encoded(noise(40, 30, seed=1))]
    *same, other = asyncio.run(ImageLoader().prepare(given, SPEC))
    assert len({prepared.digest for prepared in same}) == 1
    assert other.digest != same[0].digest
    assert same[0].num_pixels == 1200


def test_equal_bytes_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = module.prepare
    monkeypatch.setattr(module, "prepare", lambda image, spec: calls.append(spec) or real(image, spec))
    loader, data = ImageLoader(), encoded(noise(40, 30))
    first = loader.prepare_now([data], SPEC)[0]
    assert loader.prepare_now([data, data], SPEC) == [first, first]
    other = ImageProcessorSpec(geometry=MaxPatches(max_num_patches=9), patch_size=16, resample=2)
    assert loader.prepare_now([data], other)[0].digest != first.digest
    assert calls == [SPEC, other]


def test_the_cache_is_bounded() -> None:
    loader = ImageLoader(limits=LoaderLimits(cache_bytes=2 * BYTES))
    files = [encoded(noise(40, 30, seed=seed)) for seed in range(4)]
    loader.prepare_now(files, SPEC)
    assert len(loader._cache._images) == 2
    assert loader._cache._left == 0


def test_an_error_names_the_image_and_the_field() -> None:
    async def run() -> None:
        await ImageLoader().prepare([encoded(noise(4, 4)), b"nothing"], SPEC, param="images")

    with pytest.raises(BadValue, match="image 1: an image is of an unknown type") as raised:
        asyncio.run(run())
    assert raised.value.param == "images"
    with pytest.raises(BadValue, match="of type int; use a path, bytes"):
        ImageLoader().prepare_now([7], SPEC)  # type: ignore[list-item]


class Alive:
    """A marker that is garbage-collected with the upload that holds it."""


class Upload(bytes):
    alive: Alive


def test_an_image_that_is_refused_is_not_kept_in_memory() -> None:
    """Memory must not wait for the cycle collector, which counts objects, not bytes."""
    given = [Upload(b"nothing")]
    given[0].alive = Alive()
    alive = weakref.ref(given[0].alive)

    async def ask() -> None:
        with suppress(BadValue):
            await loader.prepare(given, SPEC)
            pytest.fail("the image was accepted")

    loader = ImageLoader()
    gc.disable()
    try:
        asyncio.run(ask())
        loader._decoders.shutdown()  # wait for the threads, which may still hold their last image
        given.clear()
        assert alive() is None
    finally:
        gc.enable()


def test_the_event_loop_runs_while_images_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder waits for an event that only the loop can set."""
    released, real = threading.Event(), module.prepare
    monkeypatch.setattr(module, "prepare", lambda image, spec: released.wait() and real(image, spec))

    async def run() -> int:
        prepared = asyncio.ensure_future(ImageLoader().prepare([encoded(noise(4, 4))], SPEC))
        await asyncio.sleep(0)
        released.set()
        return len(await prepared)

    assert asyncio.run(run()) == 1


def test_images_of_one_request_and_of_all_are_bounded() -> None:
    files = [encoded(noise(40, 30, seed=seed)) for seed in range(3)]
    with pytest.raises(BadValue, match="send fewer images"):
        ImageLoader(limits=LoaderLimits(max_request_bytes=2 * BYTES)).prepare_now(files, SPEC)
    full = ImageLoader(limits=LoaderLimits(max_held_bytes=2 * BYTES, cache_bytes=0))
    held = full.prepare_now(files[:2], SPEC)
    with pytest.raises(ServerFull):
        full.prepare_now(files[2:], SPEC)
    del held
    gc.collect()
    assert len(full.prepare_now(files[2:], SPEC)) == 1


def test_large_images_are_decoded_one_after_another() -> None:
    gate = module._PixelGate(100)
    order: list[str] = []
    inside, leave = threading.Event(), threading.Event()

    def large() -> None:
        with gate.pixels(90):
            inside.set()
            leave.wait()
            order.append("first")

    def small() -> None:
        with gate.pixels(20):
            order.append("second")

    threads = [threading.Thread(target=target) for target in (large, small)]
    threads[0].start()
    inside.wait()
    threads[1].start()
    leave.set()
    for thread in threads:
        thread.join()
    assert order == ["first", "second"]
    with gate.pixels(1000):  # more than the limit: admitted alone
        pass


def test_the_number_of_images_of_one_input_is_limited() -> None:
    check_count(4, 4)
    with pytest.raises(BadValue, match="has 5 images; the server accepts 4"):
        check_count(5, 4)
