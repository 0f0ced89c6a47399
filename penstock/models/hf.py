"""Runs any architecture of the transformers library with Penstock's scheduler and poolers.

It is slower than a native family. The output is hidden states, or the logits of the checkpoint's head. Rows
of equal length run as one batch, so that nothing is padded and only a key limit needs a mask.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.spec import ModelSpec
from penstock.errors import ModelLoadError
from penstock.layers.batch import Batch
from penstock.layers.head import TaskHead
from penstock.types import LengthGroup, Task

log = logging.getLogger("penstock.load")

# Task of the checkpoint's head → the class that loads the model with it, and the pooling method for logits.
_HEADS = {
    Task.CLASSIFY: ("AutoModelForSequenceClassification", "cls"),
    Task.TOKEN_CLASSIFY: ("AutoModelForTokenClassification", "all"),
    Task.SPARSE: ("AutoModelForMaskedLM", "all"),
}
_MAX_NAMES = 8  # tensor names in a message


class TransformersModel:
    """The module that transformers loads from a folder: a backbone, or a model with the checkpoint's head.

    With a head, the "hidden states" are its logits. The logits of a sequence are repeated at each of its
    tokens.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.task = spec.tasks[0] if spec.tasks[0] in _HEADS else None
        config, module = _load(spec, self.task, dtype)
        self.module: Any = module.to(device).eval()
        self.dtype = dtype
        has_segments = bool(getattr(config, "type_vocab_size", 0))
        self.reads_segments = has_segments and _passes_segments(spec.path)
        self.is_causal = False  # rows are never chunked here
        self.prunes_last_layer = False
        self.heads: dict[Task, TaskHead] = {}
        self.ignored_tensors: tuple[str, ...] = ()
        # The classifier of an encoder-decoder model reads the state of the last end token.
        self.end_token: int | None = None
        self.runs_rows_alone = False
        if self.task is None:
            self.hidden_size = int(config.hidden_size)
            return
        self.hidden_size = spec.width(self.task)
        self.heads[self.task] = TaskHead(_HEADS[self.task][1], lambda logits: logits, self.hidden_size)
        if self.task is Task.CLASSIFY:
            # An encoder-decoder needs the same number of end tokens in all rows of a call, but a text and a
            # pair differ. A decoder finds the last token of several rows only by the padding token.
            self.runs_rows_alone = config.is_encoder_decoder or config.pad_token_id is None
            self.end_token = int(config.eos_token_id) if config.is_encoder_decoder else None

    def __call__(self, batch: Batch) -> Tensor:
        shape = (batch.num_tokens, self.hidden_size)
        out = torch.empty(shape, dtype=self.dtype, device=batch.token_ids.device)
        for group in batch.groups:
            stop = group.first_token + group.num_rows * group.length
            inputs = self._inputs(batch, group, stop)
            values = self._values(inputs)
            if self.task is Task.CLASSIFY:
                values = values[:, None].expand(-1, group.length, -1)
            out[group.first_token : stop] = values.flatten(0, 1)
        return out

    def _inputs(self, batch: Batch, group: LengthGroup, stop: int) -> dict[str, Tensor]:
        rows = (group.num_rows, group.length)
        ids = batch.token_ids[group.first_token : stop].view(rows).long()
        if self.end_token is not None:  # texts have an end token; warm-up rows may have none
            ended = (ids == self.end_token).any(dim=1)
            ids = ids.clone()
            ids[:, -1] = torch.where(ended, ids[:, -1], self.end_token)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if group.key_limit:
            inputs["attention_mask"][:, group.key_limit :] = 0
        if batch.type_ids is not None and self.reads_segments:
            inputs["token_type_ids"] = batch.type_ids[group.first_token : stop].view(rows).long()
        return inputs

    def _values(self, inputs: dict[str, Tensor]) -> Tensor:
        """[rows, length, hidden], or logits: [rows, labels] of sequences or [rows, length, labels]."""
        if self.task is None:
            return self.module(**inputs).last_hidden_state  # type: ignore[no-any-return]
        if not self.runs_rows_alone:
            return self.module(**inputs).logits  # type: ignore[no-any-return]
        rows = range(len(inputs["input_ids"]))
        parts = [self.module(**{name: x[row : row + 1] for name, x in inputs.items()}) for row in rows]
        return torch.cat([part.logits for part in parts])


def _load(spec: ModelSpec, task: Task | None, dtype: torch.dtype) -> tuple[Any, Any]:
    """The configuration and the module."""
    try:
        import transformers
        from huggingface_hub.errors import StrictDataclassError
    except ImportError:
        raise ModelLoadError(
            "--model-impl transformers needs the transformers library, which penstock[hf] installs"
        ) from None
    name = "AutoModel" if task is None else _HEADS[task][0]
    if task is None and spec.architecture.endswith("EncoderModel"):  # the encoder of an encoder-decoder model
        name = "AutoModelForTextEncoding"
    options: dict[str, Any] = {"local_files_only": True}
    try:
        config = transformers.AutoConfig.from_pretrained(spec.path, **options, **spec.overrides)
        if task in (Task.CLASSIFY, Task.TOKEN_CLASSIFY) and config.num_labels != len(spec.labels):
            raise ModelLoadError(
                f"transformers reads {config.num_labels} labels from {spec.path / 'config.json'}, Penstock "
                f"{len(spec.labels)}; id2label has to name each label"
            )
        module, info = getattr(transformers, name).from_pretrained(
            spec.path, config=config, dtype=dtype, output_loading_info=True, **options
        )
    except pickle.UnpicklingError:
        raise ModelLoadError(
            f"transformers cannot load {spec.path}: its pytorch_model.bin holds more than tensors and could "
            "run code"
        ) from None
    except (OSError, ValueError, KeyError, ImportError, StrictDataclassError) as error:
        raise ModelLoadError(f"transformers cannot load {spec.path}: {error}") from None
    _check_tensors(spec.path, info, name)
    return config, module


def _passes_segments(folder: Path) -> bool:
    """Whether transformers' tokenizer passes token type ids to the model."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError):
        return True  # not every tokenizer.json comes with the other files that transformers needs
    return "token_type_ids" in tokenizer.model_input_names


def _check_tensors(folder: Path, info: Mapping[str, Collection[str]], name: str) -> None:
    """Refuse a module with tensors that the checkpoint lacks: transformers fills them with random numbers."""
    missing = [key for key in info["missing_keys"] if name != "AutoModel" or "pooler." not in key]
    if missing:
        raise ModelLoadError(
            f"{folder} has no tensors for {_shown(missing)}, which transformers' {name} needs; "
            "check architectures in config.json",
            param="model",
        )
    if info["unexpected_keys"]:
        unused = info["unexpected_keys"]
        log.warning("%s: transformers does not use %d tensors: %s", folder, len(unused), _shown(unused))


def _shown(names: Collection[str]) -> str:
    first = sorted(names)[:_MAX_NAMES]
    return ", ".join(first) + (f" and {len(names) - len(first)} more" if len(names) > len(first) else "")
