"""The OpenAI dialect: `/v1/batches`, files of requests that run in the background."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from penstock.api.call import Call, Reply
from penstock.api.dialects.openai.files import ExpiresAfter, owner_of, page_ids, query_of, service_of
from penstock.api.endpoint import Endpoint
from penstock.api.routes import RouteSpec
from penstock.batches.records import BatchRecord, LineError, Status, new_id, window_seconds
from penstock.errors import BadValue, shown

PATH = "/v1/batches"
# Routes that take JSON with a model, but cannot be used in batches.
_NOT_IN_BATCHES = (PATH, "/v1/maxsim", "/maxsim", "/generate_stream", "/invocations")
_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512  # limits of metadata


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `GET /v1/batches`."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    after: str | None = None


class RequestCounts(msgspec.Struct, kw_only=True):
    total: int
    completed: int
    failed: int


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails = InputTokensDetails()
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class BatchErrors(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[LineError]


class BatchObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchesAnswer(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def batch_endpoints(endpoints: Iterable[Endpoint]) -> dict[str, Endpoint]:
    """The endpoints that lines of a batch may name, by path: JSON for a model, not streamed by default."""
    found = {}
    for each in endpoints:
        route = each.route
        if route.body is None or route.admin or route.prefix is not None or route.path in _NOT_IN_BATCHES:
            continue
        fields = {field.name: field for field in msgspec.structs.fields(route.body)}
        streams = "stream" in fields and fields["stream"].default is True
        if "model" in fields and not streams:
            found[route.path] = each
    return found


def batch_object(batch: BatchRecord) -> BatchObject:
    usage = batch.usage
    names = BatchObject.__struct_fields__
    shared = {name: getattr(batch, name) for name in names if name in BatchRecord.__struct_fields__}
    return BatchObject(
        **shared
        | {
            "errors": BatchErrors(data=batch.errors) if batch.errors else None,
            "output_file_id": batch.output_file_id if batch.has_ended and batch.output_bytes else None,
            "error_file_id": batch.error_file_id if batch.has_ended and batch.error_bytes else None,
            "request_counts": RequestCounts(
                total=batch.total, completed=batch.completed, failed=batch.failed
            ),
            "usage": BatchUsage(
                input_tokens=usage.input_tokens,
                output_tokens=usage.output_tokens,
                total_tokens=usage.input_tokens + usage.output_tokens,
            ),
        }
    )


async def create_batch(call: Call, body: BatchRequest) -> Reply:
    """Run every line of an uploaded file in the background, as a request to one endpoint."""
    service = service_of(call)
    if body.endpoint not in service.endpoints:
        accepted = ", ".join(service.endpoints)
        raise BadValue(f"endpoint is {shown(body.endpoint)}; use one of {accepted}", param="endpoint")
    window_s = window_seconds(body.completion_window)
    _check_metadata(body.metadata)
    now, expires = int(time.time()), body.output_expires_after
    record = BatchRecord(
        id=new_id("batch_"),
        owner=owner_of(call),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + window_s,
        metadata=body.metadata,
        output_expires_s=None if expires is None else expires.seconds,
        output_file_id=new_id("file-"),
        error_file_id=new_id("file-"),
    )
    await service.call(service.store.add_batch, record)
    service.wake()
    return Reply(msgspec.json.encode(batch_object(record)))


def _check_metadata(metadata: dict[str, str] | None) -> None:
    for key, value in (metadata or {}).items():
        if len(key) > _MAX_KEY or len(value) > _MAX_VALUE:
            raise BadValue(
                f"metadata has keys of up to {_MAX_KEY} characters and values of up to {_MAX_VALUE}; "
                f"{shown(key)} exceeds them",
                param="metadata",
            )
    if metadata and len(metadata) > _MAX_PAIRS:
        raise BadValue(f"metadata has {len(metadata)} entries; use at most {_MAX_PAIRS}", param="metadata")


async def list_batches(call: Call) -> Reply:
    """List the batches of the caller's key, the newest first."""
    service, query = service_of(call), query_of(call, BatchQuery)
    found, has_more = await service.call(
        service.store.batches, owner_of(call), limit=query.limit, after=query.after
    )
    data = [batch_object(record) for record in found]
    first_id, last_id = page_ids([each.id for each in data])
    answer = BatchesAnswer(data=data, first_id=first_id, last_id=last_id, has_more=has_more)
    return Reply(msgspec.json.encode(answer))


async def retrieve_batch(call: Call) -> Reply:
    """Describe a batch: its state, and how many of its lines are answered."""
    service = service_of(call)
    record = await service.call(service.store.batch, call.path_value, owner_of(call))
    return Reply(msgspec.json.encode(batch_object(record)))


async def cancel_batch(call: Call) -> Reply:
    """Cancel a batch. Lines that are answered stay in its output file; the others go to its error file."""
    service = service_of(call)
    await service.call(service.store.batch, call.path_value, owner_of(call))

    def cancel(record: BatchRecord) -> None:
        if record.has_ended or record.status == "finalizing":
            raise BadValue(f"batch {record.id} cannot be cancelled: its status is {record.status}")
        if record.status != "cancelling":
            record.status, record.cancelling_at = "cancelling", int(time.time())

    record = await service.call(service.store.update, call.path_value, cancel)
    service.wake()
    return Reply(msgspec.json.encode(batch_object(record)))


ROUTES = (
    RouteSpec(
        PATH,
        BatchRequest,
        create_batch,
        "OpenAI",
        BatchObject,
        example={"input_file_id": "file-abc123", "endpoint": "/v1/embeddings", "completion_window": "24h"},
    ),
    RouteSpec(PATH, None, list_batches, "OpenAI", BatchesAnswer, query=BatchQuery),
    RouteSpec(
        "/v1/batches/{batch_id}", None, retrieve_batch, "OpenAI", BatchObject, path_example="batch_abc123"
    ),
    RouteSpec(
        "/v1/batches/{batch_id}/cancel",
        None,
        cancel_batch,
        "OpenAI",
        BatchObject,
        methods=("POST",),
        path_example="batch_abc123",
    ),
)
