"""Write model folders with another shape and the tokenizer of an existing folder. Weights are random."""

from __future__ import annotations

import json
from pathlib import Path

QWEN3_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
CROSS_ENCODER = {
    "architectures": ["BertForSequenceClassification"],
    "num_labels": 1,
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
}
_FILES_OF_EMBEDDERS = ("modules.json", "sentence_bert_config.json")
DERIVED = {"qwen3-8b": ("qwen3-4b", QWEN3_8B), "cross-bert-base": ("bge-base", CROSS_ENCODER)}


def derive(source: Path, target: Path, changes: dict[str, object]) -> Path:
    """Write a folder with the tokenizer of `source`, and its configuration with `changes` applied."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        link = target / file.name
        if file.name == "config.json":
            link.write_text(json.dumps(json.loads(file.read_text()) | changes, indent=1))
        elif file.is_file() and file.suffix != ".safetensors" and file.name not in _FILES_OF_EMBEDDERS:
            link.unlink(missing_ok=True)
            link.symlink_to(file.resolve())
    return target
