"""jina-embeddings-v5-text: Qwen3 (small) or EuroBERT (nano) with task adapters that PEFT saved.

`lora_task` (through `--hf-overrides`) merges one of them into the weights. Otherwise each request chooses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from penstock.checkpoint.adapters import adapter_names, read_peft_adapter
from penstock.errors import ModelLoadError
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder
from penstock.layers.linear import LinearLayer
from penstock.layers.lora import AdaptedLinear, AdapterChoice, adapter_mask
from penstock.models.decoder import qwen3_shape
from penstock.models.decoder_layers import Decoder, DecoderShape
from penstock.models.eurobert import eurobert_shape
from penstock.types import Task
from penstock.weights.adapters import AdapterSet, PeftAdapters, PeftMergedSource

_TASKS = "task_names"


class AdapterBuilder(LayerBuilder):
    """Builds layers with all adapters of the checkpoint beside their weights."""

    def __init__(self, build: LayerBuilder, adapters: PeftAdapters) -> None:
        super().__init__(build.weights, build.quantization, build.unquantized)
        self.adapters = adapters
        self.choice = AdapterChoice()

    def linear(
        self,
        names: str | Sequence[str],
        inputs: int,
        outputs: int | Sequence[int],
        act: str = "identity",
        *,
        bias: bool = True,
    ) -> LinearLayer:
        base = super().linear(names, inputs, outputs, act, bias=bias)
        names = [names] if isinstance(names, str) else list(names)
        if not any(self.adapters.has(name) for name in names):
            return base
        if act != "identity":
            raise ModelLoadError(f"an adapter on {names[0]!r}, a layer with an activation, is not supported")
        sizes = [outputs] * len(names) if isinstance(outputs, int) else outputs
        pairs = [self.adapters.read(name, size, inputs) for name, size in zip(names, sizes, strict=True)]
        up = [self._placed(part.permute(1, 0, 2).flatten(1)) for part, _ in pairs]
        down = [self._placed(part.flatten(0, 1)) for _, part in pairs]
        return AdaptedLinear(base, down, up, self.choice)

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(dtype=self.weights.dtype, device=self.weights.device).contiguous()


class AdaptedDecoder(Decoder):
    """A decoder in which each row of a batch has an adapter or none."""

    def __init__(self, build: AdapterBuilder, shape: DecoderShape) -> None:
        super().__init__(build, shape)
        self.choice = build.choice
        self.adapters = AdapterSet(len(build.adapters.adapters), build.adapters.rank, scale=1.0)
        build.adapters.check_all_read()

    def __call__(self, batch: Batch) -> Tensor:
        if batch.adapters is None:
            return super().__call__(batch)
        mask = adapter_mask(batch.adapters, batch.lengths, batch.num_tokens, self.adapters)
        self.choice.choose(mask.to(self.embedding.dtype))
        try:
            return super().__call__(batch)
        finally:
            self.choice.choose(None)


def jina_embeddings_v5(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    shape = qwen3_shape(config) if config["is_causal"] else eurobert_shape(config)
    folder, task = build.folder, config.get("lora_task")
    if folder is None:
        raise ModelLoadError("the adapters of jina-embeddings-v5 are in files beside its weights")
    if task is None:
        adapters = [read_peft_adapter(folder, name) for name in adapter_names(config, _TASKS)]
        if not adapters:
            raise ModelLoadError(f"{folder / 'config.json'} has no {_TASKS}, the names of its adapters")
        return AdaptedDecoder(AdapterBuilder(build, PeftAdapters(adapters, build.weights)), shape)
    if task not in (known := list(map(str, config.get(_TASKS) or ()))):
        raise ModelLoadError(
            f"lora_task is {task!r}, which is not among the model's adapters: {', '.join(known) or 'none'}"
        )
    merged = PeftMergedSource(build.weights, PeftAdapters([read_peft_adapter(folder, task)], build.weights))
    model = Decoder(LayerBuilder(merged, build.quantization, build.unquantized), shape)
    merged.check_all_read(model.ignored_tensors)
    return model
