"""The cost of a corpus and its queries: GPU hours, vectors, traffic. Pure arithmetic on a rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import BadValue
from penstock.planning.predict import Rate
from penstock.planning.rates import ServingRate

DTYPES = {"float32": 32, "float16": 16, "int8": 8, "binary": 1}  # bits per stored number
BYTES_PER_TOKEN = 4.5  # for English text; replaced by a measurement if there is a sample
SPARSE_TERMS = 200  # default number of non-zero weights in a SPLADE vector
_TOKEN_ID_BYTES, _SPARSE_TERM_BYTES, _SCORE_BYTES, _ID_BYTES = 4, 8, 4, 8
_BASE64 = 4 / 3
_JSON_NUMBER_BYTES = 12  # a float32 in decimal digits, with its comma


@dataclass(frozen=True)
class Corpus:
    """The texts of a job."""

    docs: int
    lengths: Sequence[int]  # tokens per text: of a sample, or only the mean
    bytes_per_doc: float
    num_truncated: int = 0  # number of `lengths` truncated to the model's limit
    from_sample: bool = False

    @property
    def mean_tokens(self) -> float:
        return float(np.mean(self.lengths))

    @property
    def tokens(self) -> float:
        return self.docs * self.mean_tokens

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.lengths, share))


@dataclass(frozen=True)
class Outputs:
    """The outputs of a model per text."""

    dense: int | None = None  # numbers in its vector
    token_vector: int | None = None  # numbers per token vector of a late-interaction model
    sparse_terms: float | None = None
    scores: int | None = None  # number of scores of a reranker or classifier


@dataclass(frozen=True)
class StoredKind:
    """One kind of output in one number format."""

    kind: str  # dense | multi-vector | sparse | scores
    dtype: str
    bytes_per_doc: float

    def total(self, docs: int) -> float:
        return self.bytes_per_doc * docs


@dataclass(frozen=True)
class Compute:
    """GPU hours, time and cost of a job."""

    gpu_hours: float
    low_hours: float  # lower end, by the range of the rate
    high_hours: float
    gpus: int
    price: float | None  # per GPU hour

    @property
    def wall_hours(self) -> float:
        return self.gpu_hours / self.gpus

    @property
    def cost(self) -> float | None:
        return None if self.price is None else self.price * self.gpu_hours

    def gpus_within(self, hours: float) -> int:
        """Compute how many GPUs finish within `hours`."""
        return max(1, math.ceil(self.gpu_hours / hours))


@dataclass(frozen=True)
class Serving:
    """The number of GPUs for a stream of queries."""

    qps: float
    query_tokens: float
    utilization: float
    qps_per_gpu: float  # at this utilization
    limit: str  # device | host

    @property
    def gpus(self) -> int:
        return max(1, math.ceil(self.qps / self.qps_per_gpu - 1e-9))


@dataclass(frozen=True)
class Traffic:
    """Bytes sent over the network, without headers."""

    text: float
    token_ids: float
    vectors: dict[str, float]  # encoding → bytes


def compute(corpus: Corpus, rate: Rate, gpus: int, price: float | None) -> Compute:
    """Compute the GPU hours of a corpus: the mean time of the sample's rows, times the number of texts."""
    hours = corpus.docs * rate.seconds_of_rows(corpus.lengths) / len(corpus.lengths) / 3600
    return Compute(hours, hours * rate.low, hours * rate.high, gpus, price)


def storage(corpus: Corpus, outputs: Outputs) -> list[StoredKind]:
    """Compute the stored bytes per text in every number format, without indexes and ids."""
    kinds = []
    if outputs.dense is not None:
        kinds += [
            StoredKind("dense", name, packed_bytes(outputs.dense, bits)) for name, bits in DTYPES.items()
        ]
    if outputs.token_vector is not None:
        kinds += [
            StoredKind("multi-vector", name, corpus.mean_tokens * packed_bytes(outputs.token_vector, bits))
            for name, bits in DTYPES.items()
        ]
    if outputs.sparse_terms is not None:
        kinds.append(StoredKind("sparse", "int32 + float32", outputs.sparse_terms * _SPARSE_TERM_BYTES))
    if outputs.scores is not None:
        kinds.append(StoredKind("scores", "float32", float(outputs.scores * _SCORE_BYTES)))
    return kinds


def packed_bytes(numbers: int, bits: int) -> float:
    """Compute the bytes of a vector, rounded up to whole bytes."""
    return float(-(-numbers * bits // 8))


def traffic(corpus: Corpus, stored: Sequence[StoredKind]) -> Traffic:
    """Compute the bytes that a client and a server exchange for a corpus, with vectors in float32."""
    plain = sum(kind.total(corpus.docs) for kind in stored if kind.dtype in ("float32", "int32 + float32"))
    vectors = {"bytes": plain, "base64": plain * _BASE64, "JSON numbers": plain / 4 * _JSON_NUMBER_BYTES}
    return Traffic(corpus.docs * corpus.bytes_per_doc, corpus.tokens * _TOKEN_ID_BYTES, vectors)


def serving(
    qps: float, query_tokens: float, utilization: float, rate: Rate, host: ServingRate | None
) -> Serving:
    """Compute the GPUs for `qps` single queries per second.

    `host` is the maximum rate of the processes around one engine; None: unlimited.
    """
    if not 0 < utilization <= 1:
        raise BadValue(
            f"--utilization is {utilization:g}; give a share above 0, up to 1, such as 0.6",
            param="--utilization",
        )
    device = 1.0 / rate.seconds_of_rows([query_tokens])
    answered = math.inf if host is None else host.requests_per_s
    limit = "device" if device <= answered else "host"
    return Serving(qps, query_tokens, utilization, utilization * min(device, answered), limit)
