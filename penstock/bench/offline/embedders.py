"""Engines that embed texts in this process: Penstock and its peers, behind one small interface.

A peer is one entry of `EMBEDDERS`; its package is imported when it is opened.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.bench.options import EmbedderName, EngineOptions
from penstock.config import available_cpus
from penstock.errors import BadValue

Vectors = NDArray[np.float32]


class Embedder(Protocol):
    def embed(self, texts: Sequence[str]) -> Vectors:
        """One vector for each text, in order. Texts are truncated at the model's limit."""
        ...

    def close(self) -> None: ...


def open_embedder(name: EmbedderName, options: EngineOptions) -> Embedder:
    return EMBEDDERS[name](options)


def import_peer(module: str, package: str) -> Any:
    """Import the module of a peer, or raise an error that names the package to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BadValue(f"{package} is not installed: pip install {package} ({error})") from None


def model_folder(options: EngineOptions) -> Path:
    from penstock.checkpoint.find import find

    return find(options.config.model, None, options.config.download_dir)


def torch_device(options: EngineOptions) -> str:
    torch = import_peer("torch", "torch")
    if options.config.threads:
        torch.set_num_threads(options.config.threads)
    if options.config.device != "auto":
        return options.config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def torch_dtype(options: EngineOptions) -> Any:
    torch = import_peer("torch", "torch")
    return torch.float32 if options.config.dtype == "auto" else getattr(torch, options.config.dtype)


class PenstockEmbedder:
    def __init__(self, options: EngineOptions) -> None:
        from penstock import Engine

        config = options.config
        self._engine = Engine(**{name: getattr(config, name) for name in config.__struct_fields__})

    def embed(self, texts: Sequence[str]) -> Vectors:
        return self._engine.embed(list(texts), truncate_prompt_tokens=-1, progress=False)

    def close(self) -> None:
        self._engine.close()


class SentenceTransformersEmbedder:
    def __init__(self, options: EngineOptions) -> None:
        refuse_quantization(options, "sentence-transformers")
        library = import_peer("sentence_transformers", "sentence-transformers")
        self._batch = options.batch_size
        self._model = library.SentenceTransformer(
            str(model_folder(options)),
            device=torch_device(options),
            model_kwargs={"dtype": torch_dtype(options)},
        )

    def embed(self, texts: Sequence[str]) -> Vectors:
        found = self._model.encode(
            list(texts), batch_size=self._batch, show_progress_bar=False, convert_to_numpy=True
        )
        return np.asarray(found, np.float32)

    def close(self) -> None:
        del self._model


class VllmEmbedder:
    def __init__(self, options: EngineOptions) -> None:
        refuse_quantization(options, "vllm")
        library = import_peer("vllm", "vllm")
        dtype = {} if options.config.dtype == "auto" else {"dtype": options.config.dtype}
        self._model = library.LLM(model=str(model_folder(options)), runner="pooling", **dtype)
        self._cut = {"truncate_prompt_tokens": -1}

    def embed(self, texts: Sequence[str]) -> Vectors:
        found = self._model.embed(list(texts), use_tqdm=False, tokenization_kwargs=self._cut)
        return np.array([output.outputs.embedding for output in found], np.float32)

    def close(self) -> None:
        del self._model


def refuse_quantization(options: EngineOptions, name: str) -> None:
    if options.config.quantization is not None:
        raise BadValue(
            f"--quantization {options.config.quantization} is not supported by {name}", param="quantization"
        )


def cpu_threads(options: EngineOptions) -> int:
    return options.config.threads or available_cpus()


def _transformers(options: EngineOptions) -> Embedder:
    from penstock.bench.offline.padded import TransformersEmbedder

    return TransformersEmbedder(options)


def _onnxruntime(options: EngineOptions) -> Embedder:
    from penstock.bench.offline.onnx import OnnxEmbedder

    return OnnxEmbedder(options)


EMBEDDERS: dict[EmbedderName, Callable[[EngineOptions], Embedder]] = {
    EmbedderName.PENSTOCK: PenstockEmbedder,
    EmbedderName.SENTENCE_TRANSFORMERS: SentenceTransformersEmbedder,
    EmbedderName.TRANSFORMERS: _transformers,
    EmbedderName.ONNXRUNTIME: _onnxruntime,
    EmbedderName.VLLM: VllmEmbedder,
}
