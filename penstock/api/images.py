"""Images in the bodies of requests: which parts are images, and the inputs with their images prepared."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from penstock.api.call import Call
from penstock.api.state import ServedModel
from penstock.errors import BadValue, NotPossible, shown
from penstock.inputs.chat import IMAGE_PARTS, has_image_parts, is_image_part
from penstock.inputs.images.loader import check_count
from penstock.inputs.images.sources import FileReader
from penstock.types import Content, PreparedImage

TEXT_KINDS = ("text", "input_text")


class ImageSource(NamedTuple):
    """An image as a body gives it: a data URI, base64, the id of a file, or a URL."""

    source: str


Part = str | ImageSource
RawContent = tuple[Part, ...]  # one input of texts and images, in their order


def image_source(given: Any, name: str) -> ImageSource:
    """The image of a part, which is a string or an object with `url` or `file_id`."""
    if isinstance(given, dict):
        given = given.get("url") or given.get("file_id")
    if not isinstance(given, str) or not given:
        fault = "a part for an image without one" if given is None else f"an image that is {shown(given)}"
        raise BadValue(
            f"{name} has {fault}; use a data URI, base64, the id of an uploaded "
            "file, or a URL that the server allows",
            param=name,
        )
    return ImageSource(given)


def content_part(part: Any, name: str) -> Part:
    """A part of a content in the shapes of OpenAI, vLLM and Voyage: a text or an image."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, str):
        return part
    if kind in TEXT_KINDS and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind in IMAGE_PARTS:
        keys = ("image_url", "image", "image_base64", "file_id")
        return image_source(next((part[key] for key in keys if part.get(key) is not None), None), name)
    raise BadValue(f"{name} has a part of type {shown(kind)}; use text, {', '.join(IMAGE_PARTS)}", param=name)


async def with_images(call: Call, model: ServedModel, items: Sequence[Any], name: str) -> list[Any]:
    """The inputs with their images prepared. Items are texts, token ids, or `RawContent`."""
    spec = model.spec.images
    if spec is None:
        raise NotPossible(f"model {model.spec.name} reads texts, not images", param=name)
    sources: list[str] = []
    for item in items:
        if isinstance(item, tuple):
            own = [part.source for part in item if isinstance(part, ImageSource)]
            check_count(len(own), call.state.config.max_images, name)
            sources += own
    images = await call.state.images.prepare(sources, spec, uploaded_files(call), param=name)
    call.num_patches += sum(len(image.patches) for image in images)
    prepared = iter(images)
    return [_content(item, prepared) if isinstance(item, tuple) else item for item in items]


def _content(item: RawContent, prepared: Any) -> Any:
    parts: tuple[str | PreparedImage, ...] = tuple(
        next(prepared) if isinstance(part, ImageSource) else part for part in item
    )
    return parts[0] if len(parts) == 1 else Content(parts)


def has_image(document: Any) -> bool:
    """Whether a query or a document of a ranking is or has an image."""
    if not isinstance(document, dict):
        return False
    return document.get("image") is not None or has_image_parts(document.get("content"))


def document_content(document: Any, name: str) -> RawContent:
    """The texts and images of a document that has images."""
    if document.get("image") is None:
        return tuple(content_part(part, name) for part in document["content"])
    image, text = image_source(document["image"], name), document.get("text")
    return (image, text) if isinstance(text, str) else (image,)


def message_images(messages: Sequence[Any]) -> RawContent:
    """The images of a conversation, in the order in which its template writes their placeholders."""
    contents: list[Any] = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if has_image_parts(content) for part in content]
    return tuple(part for part in map(_image_of, parts) if part is not None)


def _image_of(part: Any) -> ImageSource | None:
    if not is_image_part(part):
        return None
    source = content_part(part, "messages")
    assert isinstance(source, ImageSource)
    return source


async def prepared_images(
    call: Call, model: ServedModel, contents: Sequence[RawContent], name: str
) -> list[tuple[PreparedImage, ...]]:
    """The images of each content, prepared."""
    found = await with_images(call, model, contents, name)
    parts: list[Any] = [each.parts if isinstance(each, Content) else (each,) for each in found]
    return parts


def num_pixels(inputs: Sequence[Any]) -> int:
    """Pixels of all images in prepared inputs."""
    contents = (item.parts if isinstance(item, Content) else (item,) for item in inputs)
    return sum(part.num_pixels for parts in contents for part in parts if isinstance(part, PreparedImage))


def uploaded_files(call: Call) -> FileReader | None:
    """A reader of the client's uploaded files; None if the server stores no files."""
    batches = call.state.batches
    if batches is None:
        return None
    return partial(_uploaded_path, call)


def _uploaded_path(call: Call, file_id: str) -> Path:
    batches = call.state.batches
    assert batches is not None
    record = batches.store.file(file_id, "" if call.key is None else call.key.name)
    return batches.store.path(record.id)
