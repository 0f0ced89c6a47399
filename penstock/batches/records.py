"""Stored records of files and batches."""

from __future__ import annotations

import re
import secrets
from typing import Literal

import msgspec

from penstock.errors import BadValue, shown

# Lines of a batch, or an image that requests refer to.
UploadPurpose = Literal["batch", "vision", "user_data"]
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
    owner: str  # name of the API key that created it; "" if the server requires no key
    filename: str
    purpose: Purpose
    bytes: int
    created_at: int
    expires_at: int | None = None


class LineError(msgspec.Struct, kw_only=True, omit_defaults=False):
    """Why a batch was refused: an error in one line of its file, or in the file as a whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of answered lines."""

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
    output_expires_s: int | None = None  # lifetime of the files that it writes; None: the server's retention
    status: Status = "validating"
    errors: list[LineError] = []
    model: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: Usage = msgspec.field(default_factory=Usage)
    output_file_id: str  # reserved at creation; shown once the file is complete and not empty
    error_file_id: str
    output_bytes: int = 0  # committed length of the output file; bytes beyond it are invalid
    error_bytes: int = 0
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    @property
    def num_answered(self) -> int:
        return self.completed + self.failed

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


def new_id(prefix: str) -> str:
    """Create an id that cannot be guessed."""
    return prefix + secrets.token_hex(16)


def window_seconds(text: str) -> int:
    """Parse a completion window such as 24h to seconds."""
    found = re.fullmatch(r"([0-9]{1,8})([smhd])", text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise BadValue(
            f"completion_window is {shown(text)}; use a duration of up to 30 days, such as 24h, 90m or 7d",
            param="completion_window",
        )
    return seconds
