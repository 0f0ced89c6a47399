"""Queries of an inference-free sparse model: each token has a fixed weight, so no engine is needed.

Only documents run through the model. The weights are a few hundred kilobytes, read by every process that
prepares requests. Free of torch.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from penstock.checkpoint.dense import refuse_unknown_keys
from penstock.checkpoint.files import optional_json
from penstock.checkpoint.layout import QueryRoute, max_query_tokens
from penstock.checkpoint.static import MAX_TOKENS
from penstock.checkpoint.tensors import stored_tensors
from penstock.errors import BadValue, ModelLoadError
from penstock.inputs.batcher import BatchTokenizer
from penstock.inputs.long_texts import RowLimit, num_chars
from penstock.inputs.processor import InputOptions, InputProcessor, split_inputs
from penstock.inputs.prompts import is_query
from penstock.inputs.tokenizer import Tokenizer
from penstock.inputs.truncation import num_longer, truncate_rows, truncation_limit
from penstock.types import Ints, PooledOutput, PoolingParams, Request, Timings


class StaticQueries:
    """The query route of a Router: its tokenizer, and one weight for each token."""

    def __init__(self, route: QueryRoute, processor: InputProcessor) -> None:
        folder = processor.spec.root_path / route.folder
        refuse_unknown_keys(folder / "config.json", optional_json(folder / "config.json"), ("frozen",))
        self._processor = processor
        self._is_default = route.is_default
        self._tokenizer = Tokenizer(folder)
        self._tokenizer.without_special_tokens()
        self._max_tokens = max_query_tokens(folder) or MAX_TOKENS
        self.weights = _read_weights(folder / "model.safetensors")  # [vocabulary]
        if self._tokenizer.max_token_id >= len(self.weights):
            raise ModelLoadError(
                f"{folder} has weights for {len(self.weights)} tokens, but its tokenizer has ids up to "
                f"{self._tokenizer.max_token_id}",
                param="model",
            )

    def reads(self, options: InputOptions) -> bool:
        """Whether these options mark the texts as queries."""
        kind = options.input_type or options.prompt_name
        return self._is_default if kind is None else is_query(kind)

    async def request(
        self,
        request_id: str,
        inputs: object,
        params: PoolingParams,
        options: InputOptions,
        batcher: BatchTokenizer,
    ) -> Request:
        """Tokenise the queries. The request holds their tokens and is not submitted to an engine."""
        texts, rows = split_inputs(inputs)
        cut_at = truncation_limit(options.truncate_prompt_tokens, self._max_tokens)
        if texts is not None:
            prompted = self._processor.with_prompt(texts, options)
            limit = RowLimit(self._max_tokens if cut_at is None else cut_at, cut_at is not None)
            encode = partial(self._tokenizer.encode, prompted, False, limit)
            rows = await batcher.call(encode, num_chars(prompted))
        num_truncated = num_longer(rows, cut_at)
        rows = truncate_rows(rows, cut_at, self._max_tokens, (0, 0), options.truncation_side)
        token_ids = np.concatenate(rows)
        if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < len(self.weights):
            raise BadValue(
                f"input has a token id beyond the query tokenizer's, which are 0 to {len(self.weights) - 1}",
                param="input",
            )
        lengths = np.array([len(row) for row in rows], dtype=np.int32)
        return Request(
            request_id,
            token_ids,
            lengths,
            msgspec.structs.replace(params, lexical=True, top_k=None),
            num_truncated=num_truncated,
        )

    def output(self, request: Request) -> PooledOutput:
        """The output that an engine would return: one weight for each token."""
        return PooledOutput(request.id, self.weights[request.token_ids][:, None], Timings())


NO_SPECIAL_IDS: Ints = np.empty(0, dtype=np.int32)  # queries keep the weights of special tokens


def _read_weights(file: Path) -> NDArray[np.float32]:
    stored = stored_tensors(file)
    if (
        list(stored) != ["weight"]
        or len(stored["weight"].shape) != 1
        or stored["weight"].dtype not in ("F32", "F16")
    ):
        raise ModelLoadError(
            f"{file} has to hold one tensor, weight, with one F32 or F16 number a token; it has "
            f"{ {name: [tensor.dtype, *tensor.shape] for name, tensor in list(stored.items())[:4]} }",
            param="model",
        )
    try:
        with safe_open(str(file), framework="numpy") as tensors:
            weights: NDArray[np.float32] = tensors.get_tensor("weight").astype(np.float32)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{file} is not a readable safetensors file: {error}", param="model") from None
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise ModelLoadError(
            f"{file} has weights below 0 or not finite, which is not supported: a term's weight is above 0",
            param="model",
        )
    return weights
