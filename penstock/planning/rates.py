"""Measured rates and published figures of GPUs: the contents of `rates.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.planning.shape import ModelShape

_FILE = Path(__file__).with_name("rates.toml")


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Published figures of a GPU."""

    tflops: float  # dense bf16
    bandwidth: float  # GB/s
    memory: float  # GB


class ServingRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured requests per second of the processes around one engine."""

    requests_per_s: float
    cores: int
    date: str
    source: str


class HostRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Maximum tokens per second that one engine process tokenises and embeds, however fast its GPU."""

    tokens_per_s: float
    cores: int
    date: str
    source: str


class Point(NamedTuple):
    """One measurement on one machine."""

    model: str
    shape: ModelShape
    length: int  # tokens per row
    tokens_per_s: float


class MeasuredModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    shape: ModelShape
    tokens_per_s: dict[int, list[float]]  # by row length; one value per machine


class Measurements(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rates of one GPU."""

    gpu: str
    dtype: str
    date: str
    source: str
    model: list[MeasuredModel]

    @property
    def points(self) -> list[Point]:
        return list(self._points())

    def _points(self) -> Iterator[Point]:
        for model in self.model:
            for length, rates in model.tokens_per_s.items():
                for rate in rates:
                    yield Point(model.name, model.shape, length, rate)


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gpu: dict[str, Gpu]
    host: HostRate
    serving: ServingRate
    measured: list[Measurements]


@cache
def recorded_rates() -> Rates:
    with _FILE.open("rb") as stream:
        return msgspec.convert(tomllib.load(stream), Rates, strict=False)
