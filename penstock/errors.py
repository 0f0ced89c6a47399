"""All errors, as one tree.

The caller can fix a `ClientError`; an `EngineError` is the server's fault. Each class has the HTTP status of
its response, so a dialect only decides the shape of the body.
"""

from __future__ import annotations

from typing import ClassVar


class PenstockError(Exception):
    """The base of all errors. `param` names the field that caused the error, if any."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "internal_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ClientError(PenstockError):
    status = 400
    kind = "invalid_request_error"
    code = "invalid_value"


class BadValue(ClientError):
    """A field has a value that is not accepted."""


class Unauthorized(ClientError):
    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class NotFound(ClientError):
    status = 404
    kind = "not_found_error"
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(ClientError):
    status = 405
    code = "method_not_allowed"


class DeadlineExceeded(ClientError):
    status = 408
    kind = "timeout_error"
    code = "deadline_exceeded"


class BodyTooLarge(ClientError):
    status = 413
    code = "body_too_large"


class NotPossible(ClientError):
    """Well-formed, but not something this model can do."""

    status = 422
    code = "not_possible"


class QueueFull(ClientError):
    status = 429
    kind = "rate_limit_error"
    code = "queue_full"
    retry_after_s: ClassVar[int] = 1


class Cancelled(ClientError):
    """The client disconnected, so nobody reads the response."""

    status = 499
    kind = "cancelled"
    code = "cancelled"


class ModelLoadError(ClientError):
    """The model's files are missing, unreadable or of an unsupported kind."""

    code = "model_load_error"


class ConfigError(ClientError):
    """A flag or configuration key has a value that cannot work."""

    code = "config_error"


class EngineError(PenstockError):
    kind = "server_error"
    code = "engine_error"


class RowFailed(EngineError):
    """The step failed for this request; others in the batch are unaffected."""

    code = "row_failed"


class EngineUnavailable(EngineError):
    """The engine is starting, restarting or stopped."""

    status = 503
    code = "engine_unavailable"
    retry_after_s: ClassVar[int] = 2


class StartFailed(EngineError):
    """A process of the server exited each time before it could serve."""

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
