"""ONNX Runtime as a peer: runs the model's ONNX file, or exports one and caches it."""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from penstock.bench.offline.embedders import Vectors, cpu_threads, import_peer
from penstock.bench.offline.padded import Ids, PaddedEmbedder
from penstock.bench.options import EngineOptions
from penstock.checkpoint.convert import cache_folder
from penstock.errors import BadValue

_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_OUTPUT = "last_hidden_state"


class OnnxEmbedder(PaddedEmbedder):
    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        if options.config.device not in ("auto", "cpu") or options.config.dtype not in ("auto", "float32"):
            raise BadValue("onnxruntime is measured on the CPU in float32 or int8")
        self._runtime = import_peer("onnxruntime", "onnxruntime")
        file = onnx_file(self.folder)
        if options.config.quantization == "int8":
            file = self._int8(file)
        settings = self._runtime.SessionOptions()
        settings.intra_op_num_threads = cpu_threads(options)
        self._session: Any = self._runtime.InferenceSession(
            str(file), settings, providers=["CPUExecutionProvider"]
        )
        self._wanted = [value.name for value in self._session.get_inputs()]

    def hidden(self, ids: Ids, mask: Ids) -> Vectors:
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        found: Vectors = self._session.run(None, {name: given[name] for name in self._wanted})[0]
        return found

    def _int8(self, file: Path) -> Path:
        """Quantise weights per channel, and activations dynamically."""
        cached = _cached_file(self.folder, "int8")
        if not cached.is_file():
            import_peer("onnx", "onnx")
            quantization = import_peer("onnxruntime.quantization", "onnxruntime")
            cached.parent.mkdir(parents=True, exist_ok=True)
            quantization.quantize_dynamic(file, cached, per_channel=True)
        return cached


def onnx_file(folder: Path) -> Path:
    for name in ("onnx/model.onnx", "model.onnx"):
        if (folder / name).is_file():
            return folder / name
    cached = _cached_file(folder, "float32")
    if not cached.is_file():
        _export(folder, cached)
    return cached


def _cached_file(folder: Path, kind: str) -> Path:
    weights = sorted(folder.glob("*.safetensors"))
    facts = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in weights]
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
    return cache_folder() / "bench-onnx" / f"{digest}.{kind}.onnx"


def _export(folder: Path, cached: Path) -> None:
    torch = import_peer("torch", "torch")
    library = import_peer("transformers", "transformers")
    model = library.AutoModel.from_pretrained(str(folder), attn_implementation="eager").eval()
    names = [name for name in _INPUTS if name != "token_type_ids" or hasattr(model.config, "type_vocab_size")]

    class Hidden(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *values: Any) -> Any:
            return self.model(**dict(zip(names, values, strict=True))).last_hidden_state

    example = torch.ones((2, 8), dtype=torch.int64)
    axes = {0: "batch", 1: "tokens"}
    cached.parent.mkdir(parents=True, exist_ok=True)
    draft = cached.with_suffix(f".{os.getpid()}.part")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer warns about Python values
        torch.onnx.export(
            Hidden().eval(),  # the exporter restores this mode afterwards
            tuple(example for _ in names),
            str(draft),
            input_names=names,
            output_names=[_OUTPUT],
            dynamic_axes=dict.fromkeys((*names, _OUTPUT), axes),
            opset_version=17,
            dynamo=False,
        )
    draft.replace(cached)
