"""Everything that can go wrong, as one tree.

`ClientError` is the caller's to mend, `EngineError` is ours. Each class knows the HTTP status that
a server answers with, so a dialect only decides the shape of the body.
"""

from __future__ import annotations

from typing import ClassVar


class PenstockError(Exception):
    """Base of all errors; `param` names the field that caused it, where there is one."""

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
    """The client went away; nobody reads the answer."""

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
    """The step could not compute this request; others in the batch are unaffected."""

    code = "row_failed"


class EngineUnavailable(EngineError):
    """The engine is starting, restarting or gone."""

    status = 503
    code = "engine_unavailable"
    retry_after_s: ClassVar[int] = 2


class DeviceOutOfMemory(EngineError):
    """A step needs more memory than the device has left; smaller steps may fit."""

    code = "out_of_memory"


class DeviceFailed(EngineUnavailable):
    """The device can no longer be used by this process; a new one is needed."""

    code = "device_failed"


def _tree(cls: type[PenstockError]) -> list[type[PenstockError]]:
    return [cls] + [leaf for child in cls.__subclasses__() for leaf in _tree(child)]


BY_NAME: dict[str, type[PenstockError]] = {cls.__name__: cls for cls in _tree(PenstockError)}


def revive(name: str, message: str, param: str | None) -> PenstockError:
    """Rebuild an error that crossed a process boundary as (class name, message, param)."""
    return BY_NAME.get(name, EngineError)(message, param=param)
