"""Reasons why published models are not supported, for error messages. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock.checkpoint.files import optional_json, shown


class _Kind(NamedTuple):
    classes: re.Pattern[str]
    reason: str


_IMAGES = "it reads images through a vision tower that is not known"
_KINDS = (
    _Kind(
        re.compile(r"^(PaliGemma|BiPali)"),
        "it reads images by PaliGemma, of which only ColPali is supported",
    ),
    _Kind(
        re.compile(r"ModernVBert"),
        "it reads images by ModernVBERT, of which only ModernVBertModel, ModernVBertForMaskedLM and "
        "ColModernVBertForRetrieval are supported",
    ),
    _Kind(
        re.compile(
            r"VL|Vision|Visual|Image|CLIP|Clip|Siglip|SigLIP|Col(Pali|Qwen|Gemma|Idefics|Smol)|"
            r"Idefics|Llava|LLaVA|Blip|Florence|ViT|Dino|MultiModal|Multimodal|VBert|"
            r"Omni|InternVL"
        ),
        _IMAGES,
    ),
    _Kind(
        re.compile(r"Whisper|Wav2Vec|Hubert|Clap|Speech|Audio|Voxtral"),
        "it reads audio, and only text is read",
    ),
    _Kind(
        re.compile(
            r"Mamba|Jamba|Bamba|Zamba|Rwkv|RWKV|FalconH1|RecurrentGemma|Qwen3Next|Qwen3_5|NemotronH|Hybrid"
        ),
        "it has layers with recurrent state (linear attention, a state-space model), which the engine lacks",
    ),
    _Kind(
        re.compile(r"^(T5|MT5|UMT5|Bart|MBart|PLBart|LED)ForSequenceClassification$"),
        "its head reads the state of a decoder, which only --model-impl transformers runs",
    ),
    _Kind(
        re.compile(r"^(T5|MT5|UMT5|Bart|MBart|Pegasus|Marian|M2M100|LED|ProphetNet|T5Gemma2?)[A-Z]\w*"),
        "it is an encoder with a decoder, and decoders that read an encoder are not run; of T5 and mT5, "
        "T5EncoderModel and MT5EncoderModel are",
    ),
    _Kind(
        re.compile(r"^Extractor$|GLiNER2"),
        "it is a GLiNER2 model; of this kind, GLiNER (gliner_config.json) and GLiClass models are read",
    ),
    _Kind(
        re.compile(r"Gemma3n|Gemma4"),
        "some of its layers reuse the keys and values of others, which the KV cache does not know",
    ),
    _Kind(
        re.compile(r"ForGuardModel"),
        "it labels each token by four heads, two for queries and two for responses, which no task here tells "
        "apart; Qwen3Guard-Gen is supported",
    ),
    _Kind(re.compile(r"Lfm2Moe"), "its short convolutions with experts are not known"),
    _Kind(
        re.compile(r"ForQuestionAnswering|ForMultipleChoice|ForNextSentencePrediction|DoubleHeadsModel"),
        "its head answers a task that Penstock does not have",
    ),
)
_NESTED = ("vision_config", "audio_config", "vision_model", "image_size")


def why_unsupported(name: str, config: Mapping[str, Any]) -> str:
    """The reason for refusing an architecture that no family record covers."""
    for kind in _KINDS:
        if kind.classes.search(name):
            return kind.reason
    if any(key in config for key in _NESTED):
        return _IMAGES if "audio_config" not in config else "it reads more than text"
    if config.get("auto_map"):
        return (
            "Python code in its folder decides what it computes, and Penstock runs no code from a checkpoint"
        )
    return "no family is known by this name"


def why_no_config(folder: Path) -> str:
    """Why a folder without config.json cannot be read, according to its files."""
    if (folder / "adapter_config.json").is_file():
        base = optional_json(folder / "adapter_config.json").get("base_model_name_or_path")
        return (
            f"it holds an adapter for {shown(base)}, not a model; give that model, and the adapter with "
            "--enable-lora --lora-modules NAME=FOLDER"
        )
    for pattern, reason in (
        ("*.gguf", "its weights are GGUF, which is not supported; give the safetensors version of the model"),
        ("params.json", "it is in Mistral's own layout; give the version with config.json and safetensors"),
        ("onnx/*.onnx", "it holds ONNX files only; give the version with config.json and safetensors"),
        ("*.onnx", "it holds ONNX files only; give the version with config.json and safetensors"),
        ("*.nemo", "it is a NeMo archive; give the version with config.json and safetensors"),
    ):
        if any(folder.glob(pattern)):
            return reason
    return "it has no config.json"
