"""The OpenAI dialect: `/v1/files`, the input and output of batches."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Literal, TypeVar, cast, get_args
from urllib.parse import parse_qsl

import msgspec

from penstock.api.batch_service import BatchService
from penstock.api.call import Call, Reply, Streamed, streamed
from penstock.api.routes import RouteSpec
from penstock.api.uploads import BodyStream
from penstock.batches.multipart import ENVELOPE_BYTES, Form, FormReader
from penstock.batches.records import FileRecord, Purpose, UploadPurpose, new_id
from penstock.errors import BadValue, NotFound, NotPossible, TooManyRequests, shown

T = TypeVar("T", bound=msgspec.Struct)
MAX_UPLOADS = 16  # at a time, in one API process
MIN_KEPT_S, MAX_KEPT_S = 3600, 30 * 86_400  # range of `expires_after`
MAX_FILES_LISTED = 10_000
MAX_QUERY_FIELDS = 64  # parameters of a URL
_PIECE_BYTES = 1 << 18
_EXPIRY_FIELDS = ("expires_after[anchor]", "expires_after[seconds]")


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """When a file is deleted."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, msgspec.Meta(ge=MIN_KEPT_S, le=MAX_KEPT_S)]


class FileForm(msgspec.Struct, kw_only=True):
    """Form of `POST /v1/files`."""

    file: bytes
    purpose: UploadPurpose
    expires_after: ExpiresAfter | None = None


class FileQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `GET /v1/files`."""

    purpose: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_FILES_LISTED)] = MAX_FILES_LISTED
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: str | None = None


class FilesAnswer(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


def service_of(call: Call) -> BatchService:
    """The server's batch service. Raises an error that names the flag if there is none."""
    if call.state.batches is None:
        raise NotFound("this server stores no files and batches; start it with --batch-folder DIR")
    call.state.batches.check()
    return call.state.batches


def owner_of(call: Call) -> str:
    """The owner of the files and batches that a request sees: the name of its key."""
    return "" if call.key is None else call.key.name


def query_of(call: Call, kind: type[T]) -> T:
    """The parameters of the URL; others are refused by name."""
    try:
        text = call.query_string.decode("latin-1")
        given = dict(parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS))
    except ValueError:
        raise BadValue(f"the URL has more than {MAX_QUERY_FIELDS} parameters") from None
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadValue(f"a parameter of the URL is not accepted: {error}") from None


def file_object(record: FileRecord) -> FileObject:
    return FileObject(
        id=record.id,
        bytes=record.bytes,
        created_at=record.created_at,
        expires_at=record.expires_at,
        filename=record.filename,
        purpose=record.purpose,
    )


async def upload_file(call: Call, body: BodyStream) -> Reply:
    """Upload a file of lines for a batch, or an image that requests name, as a form with the fields `file`
    and `purpose`."""
    service = service_of(call)
    if service.num_uploads >= MAX_UPLOADS:
        raise TooManyRequests(
            f"{MAX_UPLOADS} files are being uploaded, which is the limit; try again shortly"
        )
    service.num_uploads += 1
    file_id = new_id("file-")
    path = service.store.upload_path(file_id)
    try:
        await _check_quota(service, 0)
        form = await _receive(service, path, body)
        record = _record(call, service, file_id, form)
        await _check_quota(service, form.num_bytes)
        await service.call(service.store.add_upload, record)
    finally:
        service.num_uploads -= 1
        path.unlink(missing_ok=True)
    return Reply(msgspec.json.encode(file_object(record)))


async def _receive(service: BatchService, path: Path, body: BodyStream) -> Form:
    """Write the file of a form to disk as it arrives."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        reader = FormReader(body.header(b"content-type"), descriptor, service.max_file_bytes)
        async for piece in body.pieces(service.max_file_bytes + ENVELOPE_BYTES):
            await asyncio.to_thread(reader.feed, piece)
        form = reader.finish()
        await asyncio.to_thread(os.fsync, descriptor)
    except OSError as error:
        raise NotPossible(f"the file cannot be stored: {error.strerror}") from None
    finally:
        os.close(descriptor)
    return form


def _record(call: Call, service: BatchService, file_id: str, form: Form) -> FileRecord:
    """What is stored about an upload; `BadValue` for a form that is not accepted."""
    if form.filename is None:
        raise BadValue("the form has no file; send it as the field file, with a filename", param="file")
    if not form.num_bytes:
        raise BadValue("the file is empty; give one line at least", param="file")
    given = dict(form.fields)
    if (purpose := given.pop("purpose", None)) not in get_args(UploadPurpose):
        raise BadValue(
            f"purpose is {shown(purpose)}; this server takes files of purpose 'batch', and images of purpose "
            "'vision' or 'user_data'",
            param="purpose",
        )
    kept_s = _kept_seconds(*(given.pop(name, None) for name in _EXPIRY_FIELDS)) or service.retention_s
    if given and call.state.config.strict_fields:
        raise BadValue(
            f"{shown(min(given))} is unknown; use file, purpose and expires_after", param=min(given)
        )
    call.ignored_fields = tuple(given)
    now = int(time.time())
    return FileRecord(
        id=file_id,
        owner=owner_of(call),
        filename=form.filename,
        purpose=cast(UploadPurpose, purpose),
        bytes=form.num_bytes,
        created_at=now,
        expires_at=None if kept_s is None else now + kept_s,
    )


def _kept_seconds(anchor: str | None, seconds: str | None) -> int | None:
    if anchor is None and seconds is None:
        return None
    try:
        given = {"anchor": anchor or "created_at", "seconds": seconds}
        return msgspec.convert(given, ExpiresAfter, strict=False).seconds
    except msgspec.ValidationError as error:
        raise BadValue(f"expires_after is not accepted: {error}", param="expires_after") from None


async def _check_quota(service: BatchService, num_bytes: int) -> None:
    """Refuse an upload if it would exceed the quota of the folder."""
    if not (quota := service.quota_bytes):
        return
    used = await service.call(service.store.used_bytes)
    if used + num_bytes > quota:
        raise NotPossible(
            f"the files of this server have {used} bytes, and --batch-quota-gb allows {quota}; delete some "
            "of them"
        )


async def list_files(call: Call) -> Reply:
    """List the files of the caller's key."""
    service, query = service_of(call), query_of(call, FileQuery)
    found, has_more = await service.call(
        service.store.files,
        owner_of(call),
        limit=query.limit,
        purpose=query.purpose,
        after=query.after,
        order=query.order,
    )
    data = [file_object(record) for record in found]
    first_id, last_id = page_ids([each.id for each in data])
    answer = FilesAnswer(data=data, first_id=first_id, last_id=last_id, has_more=has_more)
    return Reply(msgspec.json.encode(answer))


def page_ids(ids: list[str]) -> tuple[str | None, str | None]:
    """The ids that begin and end a page."""
    return (ids[0], ids[-1]) if ids else (None, None)


async def retrieve_file(call: Call) -> Reply:
    """Describe a file."""
    service = service_of(call)
    record = await service.call(service.store.file, call.path_value, owner_of(call))
    return Reply(msgspec.json.encode(file_object(record)))


async def delete_file(call: Call) -> Reply:
    """Delete a file. The input of a batch that has not ended is kept."""
    service = service_of(call)
    await service.call(service.store.delete_file, call.path_value, owner_of(call))
    return Reply(msgspec.json.encode(FileDeleted(id=call.path_value)))


async def file_content(call: Call) -> Streamed:
    """Give the content of a file."""
    service = service_of(call)
    record = await service.call(service.store.file, call.path_value, owner_of(call))
    reply = await streamed(_pieces(service.store.path(record.id), record.bytes))
    reply.content_type = b"application/jsonl"
    return reply


async def _pieces(path: Path, num_bytes: int) -> AsyncGenerator[bytes, None]:
    """The committed bytes of a file."""
    descriptor = await asyncio.to_thread(os.open, path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for at in range(0, num_bytes, _PIECE_BYTES):
            yield await asyncio.to_thread(os.pread, descriptor, min(_PIECE_BYTES, num_bytes - at), at)
    finally:
        os.close(descriptor)


ROUTES = (
    RouteSpec("/v1/files", None, upload_file, "OpenAI", FileObject, methods=("POST",), form=FileForm),
    RouteSpec("/v1/files", None, list_files, "OpenAI", FilesAnswer, query=FileQuery),
    RouteSpec("/v1/files/{file_id}", None, retrieve_file, "OpenAI", FileObject, path_example="file-abc123"),
    RouteSpec(
        "/v1/files/{file_id}",
        None,
        delete_file,
        "OpenAI",
        FileDeleted,
        methods=("DELETE",),
        path_example="file-abc123",
    ),
    RouteSpec(
        "/v1/files/{file_id}/content",
        None,
        file_content,
        "OpenAI",
        media=("application/jsonl",),
        path_example="file-abc123",
    ),
)
