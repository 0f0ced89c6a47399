"""Checks that a draft model can propose tokens to a target model. Free of torch."""

from __future__ import annotations

import logging
from pathlib import Path

from tokenizers import Tokenizer

from penstock.checkpoint.spec import ModelSpec
from penstock.errors import ConfigError

log = logging.getLogger("penstock.load")
_PARAM = "speculative_config"


def check_draft(target: ModelSpec, draft: ModelSpec) -> None:
    """Raise `ConfigError` for a draft that does not generate, or whose token ids mean other tokens."""
    if draft.why_not_generate is not None:
        raise ConfigError(
            f"{_PARAM}: the draft model {draft.name} does not generate text: {draft.why_not_generate}",
            param=_PARAM,
        )
    _check_vocabulary(target, draft)
    parameters = [_num_parameters(each) for each in (draft, target)]
    if all(parameters) and parameters[0] > parameters[1]:
        log.warning(
            "the draft model %s has more parameters than %s, so it cannot make it faster",
            draft.name,
            target.name,
        )


def _check_vocabulary(target: ModelSpec, draft: ModelSpec) -> None:
    """Compare the texts of all ids that both tokenizers have. Either may have more ids: the draft model is
    not used for tokens that it lacks, and the target model rejects proposals that it lacks."""
    files = [spec.path / "tokenizer.json" for spec in (target, draft)]
    if not any(file.is_file() for file in files):
        if draft.vocab_size != target.vocab_size:
            raise ConfigError(
                f"{_PARAM}: the draft model {draft.name} has {draft.vocab_size} tokens and {target.name} has "
                f"{target.vocab_size}, and neither has a tokenizer.json to compare; use a draft model of the "
                "same vocabulary",
                param=_PARAM,
            )
        return
    if missing := [file for file in files if not file.is_file()]:
        raise ConfigError(
            f"{_PARAM}: {missing[0]} is missing, so the tokenizers cannot be compared", param=_PARAM
        )
    if files[0].read_bytes() == files[1].read_bytes():
        return
    texts = [_token_texts(file) for file in files]
    different = sorted(
        number for number in texts[0].keys() & texts[1].keys() if texts[0][number] != texts[1][number]
    )
    if different:
        at = different[0]
        raise ConfigError(
            f"{_PARAM}: the draft model {draft.name} has other tokens than {target.name}: token {at} is "
            f"{texts[1][at]!r} instead of {texts[0][at]!r}, and {len(different)} tokens differ in all; use a "
            "draft model with the same tokenizer",
            param=_PARAM,
        )
    if num_alone := len(texts[0].keys() ^ texts[1].keys()):
        log.warning("%d tokens are in only one of %s and %s", num_alone, draft.name, target.name)


def _token_texts(file: Path) -> dict[int, str]:
    try:
        vocabulary = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises nothing more specific
        raise ConfigError(f"{_PARAM}: {file} cannot be read: {error}", param=_PARAM) from error
    return {number: text for text, number in vocabulary.items()}


def _num_parameters(spec: ModelSpec) -> int:
    """A rough measure of the parameters in a model's layers; 0 if unknown."""
    return (spec.num_layers or 0) * (spec.hidden_size or 0) ** 2
