"""Settings in tokenizer_config.json: chat templates, special tokens, and which of them surround a text."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock.checkpoint.files import optional_json, shown
from penstock.errors import ModelLoadError

log = logging.getLogger(__name__)
# Classes for which transformers 4 applied `add_bos_token` and `add_eos_token`.
_OBEYING_CLASSES = ("Llama", "CodeLlama", "Gemma", "Cohere")
_FLAGS = ("add_bos_token", "add_eos_token")
_REMOTE_QWEN = "tokenization_qwen.Qwen2Tokenizer"  # custom class of gte-Qwen2-instruct
# Classes that rebuild BERT's normaliser from tokenizer_config.json and ignore the one in tokenizer.json, and
# the model_types that use such a class by default.
_BERT_CLASSES = frozenset(("Bert", "DistilBert", "Electra", "MPNet", "MobileBert", "LayoutLM", "SqueezeBert"))
_BERT_TYPES = frozenset(("bert", "distilbert", "electra", "ernie", "mobilebert", "mpnet", "nomic_bert"))
# The same for classes that read `add_prefix_space` from tokenizer_config.json.
_BYTE_LEVEL_CLASSES = frozenset(("Roberta", "GPT2", "Bart", "Longformer"))
_BYTE_LEVEL_TYPES = frozenset(("roberta", "gpt2", "bart", "longformer"))


class BertNormalization(NamedTuple):
    """How a WordPiece tokenizer normalises a text."""

    lowercase: bool
    strip_accents: bool | None  # None: same as `lowercase`
    handle_chinese_chars: bool


def read_bert_normalization(folder: Path) -> BertNormalization | None:
    """Read a BERT tokenizer's normalisation from tokenizer_config.json; None for other classes.

    Missing options have the defaults of the class, as in transformers.
    """
    settings = optional_json(folder / "tokenizer_config.json")
    if not _is_of(folder, settings, _BERT_CLASSES, _BERT_TYPES):
        return None
    keys = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")
    lowercase, strip_accents, chinese = (_flag(folder, settings, key) for key in keys)
    return BertNormalization(lowercase is not False, strip_accents, chinese is not False)


def read_prefix_space(folder: Path) -> bool | None:
    """Whether the tokenizer prepends a space to a text; None if tokenizer.json decides.

    RoBERTa's and GPT-2's tokenizer classes read this from tokenizer_config.json.
    """
    settings = optional_json(folder / "tokenizer_config.json")
    if not _is_of(folder, settings, _BYTE_LEVEL_CLASSES, _BYTE_LEVEL_TYPES):
        return None
    return _flag(folder, settings, "add_prefix_space") is True


def _is_of(folder: Path, settings: Mapping[str, Any], classes: frozenset[str], types: frozenset[str]) -> bool:
    """Whether the tokenizer's class is in `classes`, or the model's type in `types` if no class is named."""
    if _remote_code(settings) is not None:
        return False
    config = optional_json(folder / "config.json")
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if named is None:
        return config.get("model_type") in types
    return str(named).removesuffix("Fast").removesuffix("Tokenizer") in classes


def _flag(folder: Path, settings: Mapping[str, Any], key: str) -> bool | None:
    value = settings.get(key)
    if value is not None and not isinstance(value, bool):
        file = folder / "tokenizer_config.json"
        raise ModelLoadError(f"{file} has {key} = {shown(value)}; it has to be true or false", param="model")
    return value


class TextFrame(NamedTuple):
    """The tokens before and after every text. They replace what tokenizer.json adds."""

    bos: str | None
    eos: str | None


def read_text_frame(folder: Path) -> TextFrame | None:
    """The frame that tokenizer_config.json requires; None if tokenizer.json decides.

    The models' authors trained and evaluated with transformers 4, so its rules apply:

    - `LlamaTokenizer(Fast)` and similar classes rebuilt the frame from `add_bos_token` (default true) and
      `add_eos_token` (default false), and ignored the frame in tokenizer.json. e5-mistral,
      SFR-Embedding-Mistral and Linq-Embed-Mistral end a text with `</s>` only because of this. Their
      tokenizer.json adds only `<s>`, so transformers 5 pools a different last token.
    - gte-Qwen2-instruct ends a text with `<|endoftext|>` in its own code, which reads the same two keys, both
      with default false.
    - `Qwen2Tokenizer` and `PreTrainedTokenizerFast` ignored both keys. Qwen3-Embedding has its end token in
      tokenizer.json.
    """
    settings = optional_json(folder / "tokenizer_config.json")
    flags: dict[str, Any] = {name: value for name in _FLAGS if (value := settings.get(name)) is not None}
    kind = str(settings.get("tokenizer_class") or "").removesuffix("Fast").removesuffix("Tokenizer")
    code = _remote_code(settings)
    if code is not None and not code.startswith(_REMOTE_QWEN):
        log.warning(
            "%s has a tokenizer with code of its own (%s), which is not run: the tokens are those of its "
            "tokenizer.json. Compare them with the model's own (POST /tokenize)",
            folder,
            code,
        )
        return None
    if code is None and kind not in _OBEYING_CLASSES:
        if flags.get("add_eos_token"):
            log.warning(
                "%s has add_eos_token = true in tokenizer_config.json, which its class %s ignores: "
                "tokenizer.json alone decides whether a text ends with an end token",
                folder,
                settings.get("tokenizer_class"),
            )
        return None
    if not flags:
        return None
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ModelLoadError(
                f"{folder / 'tokenizer_config.json'} has {name} = {value!r}; it has to be true or false"
            )
    known = special_tokens(settings)
    return TextFrame(
        _framing(folder, known, "bos_token", flags.get("add_bos_token", code is None)),
        _framing(folder, known, "eos_token", flags.get("add_eos_token", False)),
    )


def _framing(folder: Path, known: Mapping[str, str], name: str, is_added: bool) -> str | None:
    if is_added and name not in known:
        raise ModelLoadError(
            f"{folder / 'tokenizer_config.json'} has add_{name} = true, but names no {name}", param="model"
        )
    return known[name] if is_added else None


def _remote_code(settings: Mapping[str, Any]) -> str | None:
    """The tokenizer class of the repository's own code, from auto_map."""
    named = settings.get("auto_map")
    named = named.get("AutoTokenizer") if isinstance(named, dict) else None
    names = named if isinstance(named, list) else [named]
    return next((str(name) for name in names if name is not None), None)


def named_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a model folder by name; the unnamed one is `default`.

    `settings` is the content of its tokenizer_config.json.
    """
    known: dict[str, str] = {}
    listed = settings.get("chat_template")
    if isinstance(listed, str):
        known["default"] = listed
    elif isinstance(listed, list):
        known |= {str(entry["name"]): str(entry["template"]) for entry in listed}
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        known[file.stem] = file.read_text(encoding="utf-8")
    default = folder / "chat_template.jinja"
    if default.is_file():
        known["default"] = default.read_text(encoding="utf-8")
    return known


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like, as `tokenizer_config.json` spells them."""
    found: dict[str, str] = {}
    for name, value in settings.items():
        if name.endswith("_token") and not name.startswith("add_"):
            text = token_text(value)
            if text is not None:
                found[name] = text
    return found


def token_text(value: Any) -> str | None:
    """The text of a token that is given as a string or with its properties."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def bos_text(folder: Path) -> str:
    """The text of the begin token, for a model whose texts must begin with it."""
    return _required_text(folder, "bos_token", "begins")


def eos_text(folder: Path) -> str:
    """The text of the end token, for a model whose texts must end with it."""
    return _required_text(folder, "eos_token", "ends")


def _required_text(folder: Path, name: str, verb: str) -> str:
    file = folder / "tokenizer_config.json"
    text = special_tokens(optional_json(file)).get(name)
    if text is None:
        raise ModelLoadError(f"{file} has no {name}, which {verb} each text for this model", param="model")
    return text
