"""Peers that run padded batches, sorted by length to keep the padding small."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from penstock.bench.offline.embedders import (
    Vectors,
    import_peer,
    model_folder,
    refuse_quantization,
    torch_device,
    torch_dtype,
)
from penstock.bench.options import EngineOptions
from penstock.checkpoint.convert import tokenizer_file
from penstock.checkpoint.describe import read_spec
from penstock.errors import BadValue

Ids = NDArray[np.int64]


class PaddedEmbedder(ABC):
    """Tokenises all texts, sorts them by length, runs them in batches, and pools as the model's files
    specify."""

    def __init__(self, options: EngineOptions) -> None:
        self.folder = model_folder(options)
        self.spec = read_spec(self.folder, self.folder.name)
        self.batch_size = options.batch_size
        if self.spec.pooling.modules or len(self.spec.pooling.methods) > 1:
            raise BadValue(f"{self.folder} has heads that this backend does not support; use another")
        self.tokenizer = Tokenizer.from_file(str(tokenizer_file(self.folder)))
        self.tokenizer.enable_truncation(self.spec.max_model_len)
        self.tokenizer.no_padding()

    def embed(self, texts: Sequence[str]) -> Vectors:
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts))]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        out = np.empty((len(rows), self.spec.embed_dim), np.float32)
        for start in range(0, len(order), self.batch_size):
            rows_of_batch = order[start : start + self.batch_size]
            ids, mask = padded([rows[i] for i in rows_of_batch])
            out[rows_of_batch] = self._pooled(self.hidden(ids, mask), mask)
        return out

    @abstractmethod
    def hidden(self, ids: Ids, mask: Ids) -> Vectors:
        """[rows, length] → [rows, length, width]"""

    def close(self) -> None:
        return None

    def _pooled(self, hidden: Vectors, mask: Ids) -> Vectors:
        match self.spec.pooling.methods[0]:
            case "cls":
                pooled = hidden[:, 0]
            case "last":
                pooled = hidden[np.arange(len(hidden)), mask.sum(axis=1) - 1]
            case "mean":
                pooled = (hidden * mask[:, :, None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
            case other:
                raise BadValue(f"this backend does not pool by {other}")
        if self.spec.pooling.normalize:
            pooled = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
        return pooled.astype(np.float32)


def padded(rows: Sequence[Sequence[int]]) -> tuple[Ids, Ids]:
    longest = max(len(row) for row in rows)
    ids, mask = np.zeros((len(rows), longest), np.int64), np.zeros((len(rows), longest), np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        mask[i, : len(row)] = 1
    return ids, mask


class TransformersEmbedder(PaddedEmbedder):
    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        refuse_quantization(options, "transformers")
        library = import_peer("transformers", "transformers")
        self.torch = import_peer("torch", "torch")
        self.device = torch_device(options)
        model = library.AutoModel.from_pretrained(str(self.folder), dtype=torch_dtype(options))
        self.model = model.to(self.device).eval()

    def hidden(self, ids: Ids, mask: Ids) -> Vectors:
        with self.torch.inference_mode():
            out = self.model(
                input_ids=self.torch.from_numpy(ids).to(self.device),
                attention_mask=self.torch.from_numpy(mask).to(self.device),
            )
            found: Vectors = out.last_hidden_state.float().cpu().numpy()
        return found
