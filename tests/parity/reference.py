"""Seeded random checkpoints in real layouts, written by the reference libraries."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import models as tokenizer_models

from tests.checkpoints import WORDS, wordpiece_tokenizer, wordpiece_vocabulary

Vectors = NDArray[np.float32]
LIMIT = 64  # tokens per row


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 0 to about 100 words. Some exceed the limit, some contain unknown characters."""
    draw = random.Random(seed)
    texts = ["", "a", "?", "☃", "the the the the"]
    while len(texts) < count:
        words = draw.choices(WORDS, k=draw.choice([1, 2, 3, 5, 8, 13, 21, 34, 55, 100]))
        if draw.random() < 0.3:
            words.insert(
                draw.randrange(len(words)), draw.choice(["Été", "ждать", "的是", "42", "can't", "🙂"])
            )
        texts.append(" ".join(words).capitalize() + draw.choice(["", ".", "!", " ..."]))
    return texts


def _trained(tokenizer: Tokenizer, trainer: Any, special_tokens: list[str]) -> Tokenizer:
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3 + make_texts(200, seed=99), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    )
    assert [tokenizer.token_to_id(name) for name in special_tokens] == list(range(len(special_tokens)))
    return tokenizer


def byte_level_bpe() -> Tokenizer:
    """A tokenizer with RoBERTa's pipeline: bytes, merges, no unknown token."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return _trained(tokenizer, trainer, special)


def unigram() -> Tokenizer:
    """A tokenizer with XLM-R's pipeline: sentence pieces with a mark for spaces."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(tokenizer_models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    return _trained(tokenizer, trainer, special)


def mpnet_wordpiece() -> Tokenizer:
    """A tokenizer with MPNet's pipeline: BERT's word pieces between RoBERTa's special tokens."""
    special = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"]
    pieces = [*special, *wordpiece_vocabulary()[5:]]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(tokenizer_models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.add_special_tokens(special)
    return tokenizer


@dataclass(frozen=True)
class Family:
    config: type[Any]
    model: type[Any]
    tokenizer: Callable[[], Tokenizer]
    positions: int
    sizes: dict[str, int] = field(
        default_factory=lambda: {
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 112,
        }
    )
    more: dict[str, Any] = field(default_factory=dict)


_PAD_1 = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
FAMILIES: dict[str, Family] = {
    "bert": Family(transformers.BertConfig, transformers.BertModel, wordpiece_tokenizer, LIMIT),
    "roberta": Family(
        transformers.RobertaConfig, transformers.RobertaModel, byte_level_bpe, LIMIT + 2, more=_PAD_1
    ),
    "xlm-roberta": Family(
        transformers.XLMRobertaConfig,
        transformers.XLMRobertaModel,
        unigram,
        LIMIT + 2,
        more=_PAD_1 | {"type_vocab_size": 1, "layer_norm_eps": 1e-5},
    ),
    "camembert": Family(
        transformers.CamembertConfig,
        transformers.CamembertModel,
        unigram,
        LIMIT + 2,
        more=_PAD_1 | {"type_vocab_size": 1, "layer_norm_eps": 1e-5},
    ),
    "distilbert": Family(
        transformers.DistilBertConfig,
        transformers.DistilBertModel,
        wordpiece_tokenizer,
        LIMIT,
        sizes={"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 112},
    ),
    "mpnet": Family(
        transformers.MPNetConfig,
        transformers.MPNetModel,
        mpnet_wordpiece,
        LIMIT + 2,
        more=_PAD_1 | {"layer_norm_eps": 1e-5},
    ),
}


def with_head(name: str, kind: str) -> Family:
    """The family with its class that ends in `kind`, such as ForMaskedLM, instead of the bare model."""
    family = FAMILIES[name]
    return replace(family, model=getattr(transformers, family.model.__name__.replace("Model", kind)))


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Set every parameter far from its usual initial value, so that a dropped or swapped one is noticed."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        norm = "norm" in name.lower() and name.endswith("weight")
        parameter.data = 1 + 0.2 * noise if norm else 0.2 * noise


def write_transformer(folder: Path, family: Family, seed: int = 0, **config: Any) -> Path:
    """Write a plain transformers checkpoint: config.json, model.safetensors, tokenizer.json."""
    tokenizer = family.tokenizer()
    names = (
        {0: "cls_token", 1: "pad_token", 2: "sep_token"}
        if family.more
        else {2: "cls_token", 3: "sep_token", 0: "pad_token"}
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=LIMIT,
        **{name: tokenizer.id_to_token(number) for number, name in names.items()},
    )
    settings = family.sizes | family.more | config
    model = family.model(
        family.config(
            vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=family.positions, **settings
        )
    ).eval()
    randomise(model, seed)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def write_sentence_transformer(
    folder: Path,
    family: Family,
    *,
    pooling: str | tuple[str, ...] = "mean",
    include_prompt: bool = True,
    dense: dict[str, Any] | None = None,
    normalize: bool = True,
    prompts: dict[str, str] | None = None,
    default_prompt_name: str | None = None,
    max_seq_length: int | None = None,
    **config: Any,
) -> SentenceTransformer:
    """Write a folder with sentence-transformers; returns the reference to compare with."""
    plain = write_transformer(folder / "plain", family, **config)
    methods = (pooling,) if isinstance(pooling, str) else pooling
    parts: list[Any] = [
        modules.Transformer(str(plain), max_seq_length=max_seq_length),
        modules.Pooling(64, pooling, include_prompt=include_prompt),
    ]
    if dense is not None:
        layer = modules.Dense(64 * len(methods), **dense)
        randomise(layer, seed=5)
        parts.append(layer)
    if normalize:
        parts.append(modules.Normalize())
    reference = SentenceTransformer(
        modules=parts, device="cpu", prompts=prompts, default_prompt_name=default_prompt_name
    )
    reference.save(str(folder / "model"), create_model_card=False)
    return reference


def cosines(a: Vectors, b: Vectors) -> Vectors:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))  # type: ignore[no-any-return]
