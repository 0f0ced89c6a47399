"""File formats that commands read and write."""

from __future__ import annotations

import enum


class InputFormat(enum.StrEnum):
    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"
    TEXT = "text"


class OutputFormat(enum.StrEnum):
    PARQUET = "parquet"
    JSONL = "jsonl"
