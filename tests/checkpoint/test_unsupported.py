"""A model that cannot be served is refused by name, with the reason and what is supported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.describe import read_spec
from penstock.errors import ModelLoadError
from tests.checkpoints import write_json


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": {}}, "it reads images"),
        ({"architectures": ["BlipModel"], "vision_config": {}}, "it reads images"),
        ({"architectures": ["PaliGemmaForConditionalGeneration"]}, "it reads images by PaliGemma"),
        ({"architectures": ["BiPali"], "vision_config": {}}, "only ColPali is supported"),
        (
            {"architectures": ["ModernVBertForSequenceClassification"]},
            "ColModernVBertForRetrieval are supported",
        ),
        ({"architectures": ["ColIdefics3"], "vision_config": {}}, "it reads images"),
        ({"architectures": ["SomethingNew"], "vision_config": {}}, "it reads images"),
        ({"architectures": ["WhisperForConditionalGeneration"]}, "it reads audio"),
        ({"architectures": ["MambaForCausalLM"]}, "recurrent state"),
        ({"architectures": ["PegasusForConditionalGeneration"]}, "an encoder with a decoder"),
        ({"architectures": ["BertForQuestionAnswering"]}, "a task that Penstock does not have"),
        (
            {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": {}},
            "keys and values of others",
        ),
        ({"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {}}, "recurrent state"),
        ({"architectures": ["Qwen3ForGuardModel"]}, "by four heads"),
        ({"architectures": ["MyModel"], "auto_map": {"AutoModel": "m.MyModel"}}, "no code from a checkpoint"),
        ({"architectures": ["MyModel"]}, "no family is known by this name"),
    ],
)
def test_an_architecture_is_refused_with_its_reason_before_any_size_is_read(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    write_json(tmp_path / "config.json", config)
    with pytest.raises(ModelLoadError) as refused:
        read_spec(tmp_path, "model")
    message = str(refused.value)
    assert f"'{config['architectures'][0]}' is not supported because" in message and reason in message
    assert "supported: Bert*" in message or ", Bert*" in message


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("adapter_config.json", {"base_model_name_or_path": "org/base"}, "an adapter for 'org/base'"),
        ("model.gguf", {}, "GGUF"),
        ("params.json", {}, "Mistral's own layout"),
        ("onnx/model.onnx", {}, "ONNX files only"),
        ("README.md", {}, "it has no config.json"),
    ],
)
def test_a_folder_without_config_says_what_it_holds(
    tmp_path: Path, file: str, content: dict[str, Any], reason: str
) -> None:
    write_json(tmp_path / file, content)
    with pytest.raises(ModelLoadError, match=reason):
        read_spec(tmp_path, "model")
