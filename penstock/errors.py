"""All errors, in one class tree.

The caller can fix a `ClientError`; an `EngineError` is the server's fault. Each class defines the HTTP status
of its response, so a dialect only decides the shape of the body.
"""

from __future__ import annotations

import reprlib
from typing import Any, ClassVar

MAX_SHOWN_CHARS = 80  # characters of a value in a message
MAX_MESSAGE_CHARS = 2000
MAX_PARAM_CHARS = 200


def shown(value: Any) -> str:
    """A caller's value for a message: its `repr`, shortened where it is long or deeply nested."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = MAX_SHOWN_CHARS


def shortened(text: str, max_chars: int) -> str:
    """The text, or its beginning and end if it is too long. The end of a message says what is accepted."""
    if len(text) <= max_chars:
        return text
    end = max_chars // 4
    return f"{text[: max_chars - end - 1]}…{text[-end:]}"


class PenstockError(Exception):
    """The base of all errors. `param` names the field that caused the error, if any.

    Message and `param` are shortened, so that replies and logs do not repeat megabytes that a client sent.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.message = shortened(message, MAX_MESSAGE_CHARS)
        self.param = None if param is None else shortened(param, MAX_PARAM_CHARS)
        super().__init__(self.message)


class ClientError(PenstockError):
    status = 400
    code = "invalid_value"


class BadValue(ClientError):
    """A field has a value that is not accepted."""


class MalformedBody(BadValue):
    """The body is not JSON, or not of the shape that the route declares."""


class EmptyInput(BadValue):
    """The input is empty."""


class Unauthorized(ClientError):
    status = 401
    code = "invalid_api_key"


class Forbidden(ClientError):
    """The key is valid, but does not allow this."""

    status = 403
    code = "forbidden"


class NotFound(ClientError):
    status = 404
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class ModelNotAllowed(ModelNotFound):
    """The client's key does not allow the model. The response does not reveal whether the model exists."""


class AdapterNotFound(ModelNotFound):
    """No LoRA adapter of this name or id is loaded."""

    code = "adapter_not_found"


class MethodNotAllowed(ClientError):
    status = 405
    code = "method_not_allowed"


class DeadlineExceeded(ClientError):
    status = 408
    code = "deadline_exceeded"


class ReadTimeout(ClientError):
    """The client sent its request too slowly."""

    status = 408
    code = "read_timeout"


class OrderFailed(ClientError):
    """An operator's order for a model could not be carried out."""

    status = 409
    code = "order_failed"


class BodyTooLarge(ClientError):
    status = 413
    code = "body_too_large"


class UrlTooLong(ClientError):
    status = 414
    code = "url_too_long"


class UnsupportedEncoding(ClientError):
    """The body is compressed in a way that the server does not read."""

    status = 415
    code = "unsupported_content_encoding"


class UnknownHost(ClientError):
    """The `Host` header names a host that this server does not answer for."""

    status = 421
    code = "unknown_host"


class HeadersTooLarge(ClientError):
    status = 431
    code = "headers_too_large"


class NotPossible(ClientError):
    """The request is valid, but this model cannot do it."""

    status = 422
    code = "not_possible"


class QueueFull(ClientError):
    """Too many tokens are already queued."""

    status = 429
    code = "queue_full"
    reason: str = "tokens"  # label of the metric that counts refusals
    retry_after_s: int = 1


class TooManyRequests(QueueFull):
    """Too many requests are in flight."""

    reason = "requests"


class QueueTooSlow(QueueFull):
    """The request would wait, or has waited, longer than `--max-queue-seconds`."""

    reason = "wait"


class KeyLimitReached(QueueFull):
    """The client's key has reached its limit of requests in flight or of tokens."""

    code = "key_limit_reached"
    reason = "key_requests"  # or key_tokens


class Cancelled(ClientError):
    """The client disconnected before the response was sent."""

    status = 499
    code = "cancelled"


class NotServed(ClientError):
    """A route that other servers of the dialect have, but this one does not."""

    status = 501
    code = "not_served"


class ModelLoadError(ClientError):
    """The model's files are missing, unreadable or of an unsupported kind."""

    code = "model_load_error"


class ConfigError(ClientError):
    """A flag or configuration key has a value that cannot work."""

    code = "config_error"


class EngineError(PenstockError):
    code = "engine_error"


class RowFailed(EngineError):
    """The step failed for this request; others in the batch are unaffected."""

    code = "row_failed"


class EngineUnavailable(EngineError):
    """The engine is starting, restarting or stopped."""

    status = 503
    code = "engine_unavailable"
    retry_after_s: ClassVar[int] = 2


class ModelAsleep(EngineUnavailable):
    """The model is asleep, and did not wake in time or could not be woken."""

    code = "model_asleep"
    retry_after_s = 5


class ServerFull(EngineError):
    """The server has reached its limit of connections or buffered bytes. Retry in a moment."""

    status = 503
    code = "server_full"
    retry_after_s: ClassVar[int] = 1


class StartFailed(EngineError):
    """A server process exited at each start before it could serve."""

    code = "start_failed"


class DeviceOutOfMemory(EngineError):
    """A step needs more memory than the device has free; smaller steps may fit."""

    code = "out_of_memory"


class DeviceFailed(EngineUnavailable):
    """This process can no longer use the device; a new process is needed."""

    code = "device_failed"


def _tree(cls: type[PenstockError]) -> list[type[PenstockError]]:
    return [cls] + [leaf for child in cls.__subclasses__() for leaf in _tree(child)]


BY_NAME: dict[str, type[PenstockError]] = {cls.__name__: cls for cls in _tree(PenstockError)}


def revive(name: str, message: str, param: str | None) -> PenstockError:
    """Rebuild an error from the (class name, message, param) that crossed a process boundary."""
    return BY_NAME.get(name, EngineError)(message, param=param)
