"""What is stored about a file and about a batch."""

from __future__ import annotations

import re
import secrets
from typing import Literal

import msgspec

from penstock.errors import BadValue, shown

UploadPurpose = Literal["batch", "vision", "user_data"]  # lines of a batch, or an image for requests to name
Purpose = Literal["batch", "batch_output", "vision", "user_data"]
Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
UNFINISHED: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
ENDED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")
MAX_WINDOW_S = 30 * 86_400
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class FileRecord(msgspec.Struct, kw_only=True):
    id: str
    owner: str  # name of the API key that made it; "": the server asked for none
    filename: str
    purpose: Purpose
    bytes: int
    created_at: int
    expires_at: int | None = None


class LineError(msgspec.Struct, kw_only=True, omit_defaults=False):
    """Why a batch was refused: one line of its file, or the file as a whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of answered lines."""

    input_tokens: int = 0
    output_tokens: int = 0

    def add(self, other: Usage) -> None:
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens


class BatchRecord(msgspec.Struct, kw_only=True):
    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_expires_s: int | None = None  # after the creation of the files that it writes; None: retention
    status: Status = "validating"
    errors: list[LineError] = []
    model: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: Usage = msgspec.field(default_factory=Usage)
    output_file_id: str  # reserved when the batch is made; shown when the file is complete and not empty
    error_file_id: str
    output_bytes: int = 0  # of the file that are valid; whatever follows them was never committed
    error_bytes: int = 0
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


def new_id(prefix: str) -> str:
    """An id that cannot be guessed."""
    return prefix + secrets.token_hex(16)


def window_seconds(text: str) -> int:
    """The seconds of a completion window such as 24h."""
    found = re.fullmatch(r"([0-9]{1,8})([smhd])", text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise BadValue(
            f"completion_window is {shown(text)}; use a duration of up to 30 days, such as 24h, 90m or 7d",
            param="completion_window",
        )
    return seconds
