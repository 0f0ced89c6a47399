"""File formats and other enumerated options of a job. Imports nothing heavy."""

from __future__ import annotations

import enum


class InputFormat(enum.StrEnum):
    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"
    TEXT = "text"
    LANCE = "lance"
    IMAGE = "image"  # one row per file
    PDF = "pdf"  # one row per page


class OutputFormat(enum.StrEnum):
    PARQUET = "parquet"
    JSONL = "jsonl"
    LANCE = "lance"


class VectorKind(enum.StrEnum):
    DENSE = "dense"
    SPARSE = "sparse"
    MULTI_VECTOR = "multi-vector"


class OnError(enum.StrEnum):
    FAIL = "fail"
    SKIP = "skip"
