"""Small model folders in the Hugging Face layout, written without transformers."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_WORDS = """
the of and to in a is was it for on are as with his they at be this have from or one had by word but
not what all were we when your can said there use an each which she do how their if will up other
about out many then them these so some her would make like him into time has look two more write go
see number no way could people my than first water been call who oil its now find long query passage
search document represent sentence
"""
WORDS = tuple(_WORDS.split())


def wordpiece_vocabulary() -> list[str]:
    letters = string.ascii_lowercase + string.digits + string.punctuation + "éàßждиαβγ的是不"
    pieces = [*letters, *(f"##{letter}" for letter in letters), *WORDS, "##ing", "##ed", "##s"]
    return [*SPECIALS, *dict.fromkeys(pieces)]


def wordpiece_tokenizer(lowercase: bool = True) -> Tokenizer:
    """BERT's tokenizer with a small vocabulary: [CLS] text [SEP]."""
    vocabulary = {token: number for number, token in enumerate(wordpiece_vocabulary())}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def write_json(file: Path, value: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value))


BERT_CONFIG = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": len(wordpiece_vocabulary()),
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}


FP8_BLOCKS: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}


def bert_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Seeded tensors of a BERT encoder under their usual names."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], hidden),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], hidden),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        linears = {
            "attention.self.query": (hidden, hidden),
            "attention.self.key": (hidden, hidden),
            "attention.self.value": (hidden, hidden),
            "attention.output.dense": (hidden, hidden),
            "intermediate.dense": (inner, hidden),
            "output.dense": (hidden, inner),
        }
        for name, shape in linears.items():
            shapes[f"encoder.layer.{layer}.{name}.weight"] = shape
            shapes[f"encoder.layer.{layer}.{name}.bias"] = shape[:1]
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"encoder.layer.{layer}.{name}.weight"] = (hidden,)
            shapes[f"encoder.layer.{layer}.{name}.bias"] = (hidden,)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator) * 0.2
        tensors[name] = 1 + values / 2 if name.endswith("LayerNorm.weight") else values
    return tensors


def write_bert(
    folder: Path,
    *,
    tensors: dict[str, Tensor] | None = None,
    config: dict[str, Any] | None = None,
    modules: bool = True,
) -> Path:
    """Write a complete sentence-transformers folder: mean pooling, normalised, at most 64 tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    config = BERT_CONFIG | (config or {})
    write_json(folder / "config.json", config)
    save_file(bert_tensors(config) if tensors is None else tensors, folder / "model.safetensors")
    wordpiece_tokenizer().save(str(folder / "tokenizer.json"))
    if modules:
        kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
        write_modules(folder, kinds)
        pooling = {"word_embedding_dimension": config["hidden_size"], "pooling_mode_mean_tokens": True}
        write_json(folder / "1_Pooling/config.json", pooling)
    return folder


def write_modules(folder: Path, kinds: list[tuple[str, str]]) -> None:
    rows = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    write_json(folder / "modules.json", rows)


def write_splade(folder: Path) -> Path:
    """Write a SparseEncoder folder: BERT with its masked-language head."""
    size = BERT_CONFIG["hidden_size"]
    tensors = {f"bert.{name}": tensor for name, tensor in bert_tensors(BERT_CONFIG).items()}
    generator = torch.Generator().manual_seed(1)
    head = "cls.predictions."
    tensors[f"{head}transform.dense.weight"] = torch.randn((size, size), generator=generator) * 0.2
    tensors[f"{head}transform.dense.bias"] = torch.randn(size, generator=generator) * 0.2
    tensors[f"{head}transform.LayerNorm.weight"] = torch.ones(size)
    tensors[f"{head}transform.LayerNorm.bias"] = torch.zeros(size)
    tensors[f"{head}bias"] = torch.randn(BERT_CONFIG["vocab_size"], generator=generator)
    write_bert(folder, tensors=tensors, config={"architectures": ["BertForMaskedLM"]}, modules=False)
    write_modules(folder, [("MLMTransformer", ""), ("SpladePooling", "1_SpladePooling")])
    pooling = {"pooling_strategy": "max", "word_embedding_dimension": BERT_CONFIG["vocab_size"]}
    write_json(folder / "1_SpladePooling/config.json", pooling)
    return folder


def write_static(folder: Path) -> Path:
    """Write a SentenceTransformer of a token table and Normalize. It has no config.json."""
    tokenizer = wordpiece_tokenizer()
    draw = torch.Generator().manual_seed(2)
    folder.mkdir(parents=True, exist_ok=True)
    table = torch.randn((tokenizer.get_vocab_size(), 32), generator=draw)
    save_file({"embedding.weight": table}, folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    write_modules(folder, [("StaticEmbedding", ""), ("Normalize", "1_Normalize")])
    return folder


def write_lexical(folder: Path) -> Path:
    """Write a BERT with the sparse layer of BGE-M3 in a file of its own."""
    write_bert(folder)
    weight = torch.randn((1, BERT_CONFIG["hidden_size"]), generator=torch.Generator().manual_seed(1))
    torch.save({"weight": weight, "bias": torch.full((1,), 0.3)}, folder / "sparse_linear.pt")
    return folder


def write_m3(folder: Path) -> Path:
    """Write a BERT with the sparse and the multi-vector layer of BGE-M3."""
    write_lexical(folder)
    width, generator = BERT_CONFIG["hidden_size"], torch.Generator().manual_seed(2)
    tensors = {
        "weight": torch.randn((width, width), generator=generator),
        "bias": torch.randn(width, generator=generator),
    }
    torch.save(tensors, folder / "colbert_linear.pt")
    return folder


def write_cross_encoder(folder: Path, labels: int = 1, **config: Any) -> Path:
    """Write a BERT that scores pairs of texts."""
    size = BERT_CONFIG["hidden_size"]
    tensors = {f"bert.{name}": tensor for name, tensor in bert_tensors(BERT_CONFIG).items()}
    generator = torch.Generator().manual_seed(7)
    for name, shape in {"bert.pooler.dense": (size, size), "classifier": (labels, size)}.items():
        tensors[f"{name}.weight"] = torch.randn(shape, generator=generator)
        tensors[f"{name}.bias"] = torch.randn(shape[0], generator=generator)
    names = {str(label): f"LABEL_{label}" for label in range(labels)}
    settings = {"architectures": ["BertForSequenceClassification"], "id2label": names} | config
    return write_bert(folder, tensors=tensors, config=settings, modules=False)


def write_late(folder: Path, dim: int = 16) -> Path:
    """Write a ColBERT: one vector of `dim` for each token."""
    config = BERT_CONFIG | {"architectures": ["HF_ColBERT"], "dim": dim}
    tensors = {f"bert.{name}": tensor for name, tensor in bert_tensors(config).items()}
    generator = torch.Generator().manual_seed(2)
    tensors["linear.weight"] = torch.randn((dim, config["hidden_size"]), generator=generator)
    write_bert(folder, tensors=tensors, config=config, modules=False)
    write_json(folder / "special_tokens_map.json", {"mask_token": "[MASK]", "unk_token": "[UNK]"})
    metadata = {"query_maxlen": 12, "query_token_id": "query", "doc_token_id": "document"}
    write_json(folder / "artifact.metadata", metadata)
    return folder


def write_token_classifier(folder: Path, labels: Sequence[str] = ("O", "B-PER", "I-PER")) -> Path:
    """Write a BERT that labels each token."""
    generator = torch.Generator().manual_seed(1)
    head = {
        "classifier.weight": torch.randn(len(labels), BERT_CONFIG["hidden_size"], generator=generator),
        "classifier.bias": torch.zeros(len(labels)),
    }
    tensors = {f"bert.{name}": value for name, value in bert_tensors(BERT_CONFIG).items()} | head
    config = {
        "architectures": ["BertForTokenClassification"],
        "id2label": {str(index): name for index, name in enumerate(labels)},
    }
    return write_bert(folder, tensors=tensors, config=config, modules=False)
