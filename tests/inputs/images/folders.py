"""Small processor folders in transformers' layouts, with tokenizers made for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SENTENCES = [
    "Describe the image. Question: what does the revenue chart of the third quarter show?",
    "Query: a cat on a sofa User: Assistant: user system assistant Represent the user's input.",
]


def write_tokenizer(
    folder: Path, special: list[str], frame: tuple[str, str] = ("", ""), **settings: Any
) -> None:
    """Write a byte-level tokenizer with these special tokens. `frame`: the tokens around every text."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    if any(frame):
        begin, end = (f"{token} " if token else "" for token in frame)
        ids = [(token, tokenizer.token_to_id(token)) for token in frame if token]
        template = f"{begin}$A {end}".strip()
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
