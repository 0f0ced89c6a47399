"""Generation fields become `SamplerParams`, or an error that names the field and the accepted values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.errors import BadValue
from penstock.inputs.generation import GenerationFields, GenerationInputs, JobOptions
from penstock.inputs.tokenizer import Tokenizer
from penstock.types import Grammar, SamplerParams, Task
from tests.helpers import ints
from tests.text_models import LIMIT, text_spec, write_text_model


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> GenerationInputs:
    return made(tmp_path_factory.mktemp("model"))


def made(
    folder: Path, kind: str = "byte bpe", config: dict[str, Any] | None = None, **generation: Any
) -> GenerationInputs:
    write_text_model(folder, kind, **generation)
    return GenerationInputs(text_spec(folder, config=config or {}), Tokenizer(folder))


def fields(**given: Any) -> GenerationFields:
    return msgspec.convert(given, GenerationFields)


def sampling(text: GenerationInputs, prompt: int = 3, **given: Any) -> SamplerParams:
    how = {name: given.pop(name) for name in ("logprobs", "echo", "default_max_tokens") if name in given}
    return text.sampling(fields(**given), [ints([1] * prompt)], JobOptions(**how))


def test_default_fields_give_plain_sampling(text: GenerationInputs) -> None:
    eos = text.tokenizer.token_id("<|im_end|>")
    assert sampling(text) == SamplerParams(max_tokens=16, eos_token_ids=(eos,))


def test_every_field_reaches_the_sampler(text: GenerationInputs) -> None:
    got = sampling(
        text, max_tokens=9, min_tokens=2, temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=11,
        presence_penalty=-2, frequency_penalty=2, repetition_penalty=1.5, logit_bias={"5": 200, "7": -1},
        allowed_token_ids=[3, 4], stop_token_ids=[9], ignore_eos=True, prompt_logprobs=3, logprobs=20,
    )  # fmt: skip
    assert got == SamplerParams(
        max_tokens=9, min_tokens=2, temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=11,
        presence_penalty=-2, frequency_penalty=2, repetition_penalty=1.5, logit_bias={5: 100, 7: -1},
        allowed_token_ids=(3, 4), stop_token_ids=(9,), ignore_eos=True, prompt_logprobs=3, logprobs=20,
        eos_token_ids=text.eos_token_ids,
    )  # fmt: skip


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
    ({"max_tokens": -1}, "max_tokens is -1"),
    ({"max_tokens": LIMIT}, f"at most {LIMIT} tokens; the prompt has 3 and max_tokens is {LIMIT}"),
    ({"temperature": -0.1}, "temperature is -0.1"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"top_p": 0}, "top_p is 0; use a value above 0, at most 1"),
    ({"top_p": 1.1}, "top_p is 1.1"),
    ({"min_p": -0.1}, "min_p"),
    ({"top_k": -2}, "top_k is -2"),
    ({"presence_penalty": 2.1}, "presence_penalty is 2.1; use -2 to 2"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ({"n": 0}, "n is 0"),
    ({"min_tokens": 17}, "min_tokens is 17, above max_tokens; use 0 to 16"),
    ({"min_tokens": -1}, "min_tokens is -1"),
    ({"logprobs": 21}, "logprobs is 21; use 0 to 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
    ({"logit_bias": {"x": 1}}, "the key 'x'"),
    ({"logit_bias": {"99999": 1}}, "logit_bias has 99999"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids has -1"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids has"),
    ({"bad_words": [" "]}, "bad_words has an empty text"),
    ({"seed": 2**63}, "64 bits"),
    ({"guided_regex": "a{1000000}"}, "repeats more than"),
    ({"guided_json": "{"}, "guided_json is not valid JSON"),
    ({"guided_json": "[" * 5000}, "nests"),
    ({"guided_grammar": "x" * 300_000}, "characters"),
    ({"guided_choice": []}, "at least one text"),
    ({"guided_choice": ["a"], "guided_regex": "b"}, "guided_regex and guided_choice contradict"),
    ({"guided_regex": "b", "ignore_eos": True}, "ignore_eos and structured output contradict"),
    ({"response_format": {"type": "json_schema"}}, "needs json_schema.schema"),
    ({"structured_outputs": {"regex": "a" * 300_000}}, "characters"),
    ({"temperature": 1e308}, "use 0 to 1000"),
    ({"temperature": float("inf")}, "temperature is inf"),
    ({"top_p": float("nan")}, "top_p is nan"),
    ({"top_k": 2**64}, "top_k is"),
    ({"top_k": -(10**5000)}, "top_k is a number of"),
    ({"repetition_penalty": 1e308}, "use 1e-06 to 1e+06"),
    ({"repetition_penalty": 1e-308}, "use 1e-06 to 1e+06"),
    ({"presence_penalty": float("nan")}, "presence_penalty is nan"),
    ({"max_tokens": 10**5000}, "max_tokens is a number of"),
    ({"min_tokens": 10**5000}, "min_tokens is a number of"),
    ({"seed": 10**5000}, "64 bits"),
    ({"n": 10**9}, "at most 16384 sequences"),
    ({"logprobs": 10**5000}, "use 0 to 20"),
    ({"logit_bias": {"9" * 5000: 1}}, "keys must be token ids"),
    ({"logit_bias": {"٣": 1}}, "keys must be token ids"),
    ({"logit_bias": {"3": float("inf")}}, "finite"),
    ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "use at most 1024"),
    ({"allowed_token_ids": [10**5000]}, "allowed_token_ids has a number of"),
    ({"bad_words": ["x"] * 2 + [str(i) for i in range(1025)]}, "use at most 1024"),
    ({"bad_words": ["é" * 100_000]}, "use shorter ones"),
    ({"bad_words": ["abc xyz " * 60]}, "tokens in one text"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "words"), BAD, ids=[words[:30] for _, words in BAD])
def test_bad_values_are_rejected_with_a_reason(
    text: GenerationInputs, given: dict[str, Any], words: str
) -> None:
    if any(name.startswith(("guided", "structured", "response")) for name in given):
        pytest.importorskip("llguidance")
    names = {name.split(".")[0] for name in given}
    with pytest.raises(BadValue) as caught:
        sampling(text, **given)
    assert words in caught.value.message
    assert caught.value.param in names | {"guided_regex", "response_format"}


@pytest.mark.parametrize("stop", ["", ["a", ""], ["x"] * 3 + [str(i) for i in range(64)]])
def test_stop_strings_are_checked(text: GenerationInputs, stop: Any) -> None:
    with pytest.raises(BadValue) as caught:
        text.job("r", [ints([1])], fields(stop=stop))
    assert caught.value.param == "stop"


def test_stop_token_ids_are_distinct_and_bounded(text: GenerationInputs) -> None:
    assert sampling(text, stop_token_ids=[3, 5] * 1_000_000).stop_token_ids == (3, 5)
    many = msgspec.structs.replace(text.spec, vocab_size=5000)
    text = GenerationInputs(many, text.tokenizer)
    assert len(sampling(text, stop_token_ids=list(range(1024))).stop_token_ids) == 1024
    with pytest.raises(BadValue, match="stop_token_ids has 1025 token ids; use at most 1024"):
        sampling(text, stop_token_ids=list(range(1025)))


def test_a_long_cache_salt_and_long_stop_strings_are_refused(text: GenerationInputs) -> None:
    for given, param in (({"cache_salt": "x" * 1025}, "cache_salt"), ({"stop": ["x" * 8193]}, "stop")):
        with pytest.raises(BadValue) as caught:
            text.job("r", [ints([1])], fields(**given))
        assert caught.value.param == param


def test_equivalent_values_give_equal_parameters(text: GenerationInputs) -> None:
    assert sampling(text, top_k=2**62).top_k == 0  # larger than the vocabulary: all tokens
    assert sampling(text, top_p=1e-300).top_p == 1e-6
    assert sampling(text, top_k=-1).top_k == 0
    assert sampling(text, temperature=0.001).temperature == 0.01
    assert sampling(text, temperature=0).temperature == 0
    assert sampling(text, seed=-1).seed is None
    assert text.job("r", [ints([1])], fields(stop="x")).stops == ("x",)


def test_without_max_tokens_the_remaining_room_is_used(text: GenerationInputs) -> None:
    assert sampling(text, prompt=LIMIT - 5, default_max_tokens=None).max_tokens == 5
    assert sampling(text, prompt=LIMIT - 5).max_tokens == 5
    assert sampling(text, default_max_tokens=None).max_tokens == LIMIT - 3
    with pytest.raises(BadValue, match=f"the prompt has {LIMIT}"):
        sampling(text, prompt=LIMIT)


def test_echo_with_zero_tokens_samples_one_and_scores_the_prompt(text: GenerationInputs) -> None:
    got = sampling(text, max_tokens=0, echo=True, logprobs=1)
    assert (got.max_tokens, got.logprobs, got.prompt_logprobs) == (1, 1, 1)


def test_generation_config_gives_the_defaults(tmp_path: Path) -> None:
    own = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 40, "eos_token_id": [5, 7]}
    text = made(tmp_path, config={"eos_token_id": 9}, **own)
    got = sampling(text, default_max_tokens=None)
    assert (got.temperature, got.top_p, got.top_k, got.max_tokens) == (0.6, 0.95, 20, 40)
    assert got.eos_token_ids == (text.tokenizer.token_id("<|im_end|>"), 5, 7, 9)
    assert sampling(text, temperature=1.0, top_k=0).top_k == 0 and sampling(text).max_tokens == 16


def test_bad_words_match_with_and_without_a_leading_space(text: GenerationInputs) -> None:
    encode = text.tokenizer.encode
    bare, spaced = (ids.tolist() for ids in encode(["water", " water"], add_special_tokens=False))
    words = sampling(text, bad_words=["water"]).bad_token_ids
    assert tuple(bare) in words
    assert (tuple(spaced) in words) == (len(spaced) == len(bare) and spaced[0] != bare[0])


def test_prompts_are_texts_or_ids(text: GenerationInputs, tmp_path: Path) -> None:
    one, two = text.tokenizer.encode(["the water", "long"], add_special_tokens=False)
    for prompt, count in (
        ("the water", 1),
        (["the water", "long"], 2),
        (one.tolist(), 1),
        ([one.tolist(), two.tolist()], 2),
    ):
        rows = text.rows(prompt, fields())
        assert len(rows) == count and rows[0].tolist() == one.tolist()
    for bad, words in (
        ([], "prompt is empty"),
        ([99999], "prompt has 99999"),
        ("", "no tokens"),
        ([[]], "no tokens"),
        (["a", 1], "prompt 1 is not a text"),
    ):
        with pytest.raises(BadValue, match=words) as caught:
            text.rows(bad, fields())
        assert caught.value.param == "prompt"
    with_begin = made(tmp_path / "s", "sentence bpe")
    assert with_begin.rows("the", fields())[0][0] == 1
    assert with_begin.rows("the", fields(), add_special_tokens=False)[0][0] != 1


def test_a_prompt_has_no_end_token(tmp_path: Path) -> None:
    """Tokenizers of embedders append an end token to every text."""
    from tokenizers import Tokenizer as Rust
    from tokenizers import processors

    text = made(tmp_path)
    rust = Rust.from_file(str(tmp_path / "tokenizer.json"))
    end = rust.token_to_id("<|endoftext|>")
    rust.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
    )
    rust.save(str(tmp_path / "tokenizer.json"))
    ending = GenerationInputs(text.spec, Tokenizer(tmp_path))
    assert ending.tokenizer.encode(["the"])[0][-1] == end
    assert ending.rows("the", fields())[0].tolist() == text.rows("the", fields())[0].tolist()


def test_long_prompts_are_truncated_on_request(text: GenerationInputs) -> None:
    ids = [i % 50 for i in range(300)]
    assert text.rows(ids, fields(truncate_prompt_tokens=10))[0].tolist() == ids[-10:]
    assert text.rows(ids, fields(truncate_prompt_tokens=10, truncation_side="right"))[0].tolist() == ids[:10]
    assert len(text.rows(ids, fields(truncate_prompt_tokens=-1, max_tokens=20))[0]) == LIMIT - 20


def test_rows_share_a_request_unless_seeds_or_stops_differ(text: GenerationInputs) -> None:
    prompts = [ints([1, 2]), ints([3])]
    ((request, rows),) = text.job("r", prompts, fields(n=2)).requests()
    assert rows == [0, 1, 2, 3] and request.lengths.tolist() == [2, 2, 1, 1]
    assert request.params.task is Task.GENERATE and request.sampling is not None
    seeded = text.job("r", prompts, fields(n=2, seed=2**63 - 1)).requests()
    assert [rows for _, rows in seeded] == [[0, 2], [1, 3]]
    assert [request.sampling.seed for request, _ in seeded] == [2**63 - 1, -(2**63)]  # type: ignore[union-attr]
    assert np.array_equal(seeded[1][0].token_ids, [1, 2, 3])
    stopped = text.job("r", prompts, fields(n=2, stop="x", seed=1)).requests()
    assert [rows for _, rows in stopped] == [[0], [1], [2], [3]]
    assert [request.sampling.seed for request, _ in stopped] == [1, 2, 1, 2]  # type: ignore[union-attr]
    assert len({request.id for request, _ in stopped}) == 4
    assert not text.job("r", prompts, fields(prompt_logprobs=1)).requests()[0][0].reuse_prefix


@pytest.mark.parametrize(
    ("given", "kind", "part"),
    [
        ({"response_format": {"type": "json_object"}}, "json", "object"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "integer"}},
                }
            },
            "json",
            "integer",
        ),
        ({"guided_json": '{"type": "array"}'}, "json", "array"),
        ({"structured_outputs": {"json": {"type": "null"}}}, "json", "null"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "lark", '"a" | "b"'),
        ({"guided_grammar": 'root ::= "x" [0-9]+'}, "gbnf", "x"),
        ({"guided_regex": "[a-z]+"}, "regex", "[a-z]+"),
    ],
)
def test_every_spelling_of_structured_output_gives_its_grammar(
    text: GenerationInputs, given: dict[str, Any], kind: str, part: str
) -> None:
    pytest.importorskip("llguidance")
    grammar = sampling(text, **given).grammar
    assert isinstance(grammar, Grammar) and grammar.kind == kind and part in grammar.text


def test_response_format_text_is_no_constraint(text: GenerationInputs) -> None:
    assert sampling(text, response_format={"type": "text"}).grammar is None
