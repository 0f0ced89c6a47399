from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.bench.datasets.item import Item
from penstock.bench.datasets.load import count_tokens, load_items, templated
from penstock.bench.datasets.random import range_ratios
from penstock.bench.datasets.tokens import BenchTokenizer, load_tokenizer
from penstock.bench.options import DataOptions, DatasetName
from penstock.errors import BadValue


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> BenchTokenizer:
    return load_tokenizer(str(model))


def items(tokenizer: BenchTokenizer, **fields: Any) -> list[Item]:
    return load_items(DataOptions(**fields), lambda: tokenizer)


def test_random_prompts_have_the_given_length_with_special_tokens(tokenizer: BenchTokenizer) -> None:
    made = items(tokenizer, num_prompts=30, random_input_len=17)
    texts = [str(item.prompt) for item in made]
    assert [len(ids) for ids in tokenizer.encode(texts)] == [17] * 30
    assert len(set(texts)) > 20  # the vocabulary has fewer than 200 words


def test_random_lengths_stay_within_the_range(tokenizer: BenchTokenizer) -> None:
    made = items(tokenizer, num_prompts=200, random_input_len=42, random_range_ratio="0.5")
    lengths = [item.tokens or 0 for item in made]
    assert min(lengths) >= 22
    assert max(lengths) <= 62
    assert len(set(lengths)) > 20


def test_input_and_output_may_vary_differently(tokenizer: BenchTokenizer) -> None:
    ratio = '{"input": 0.0, "output": 0.5}'
    made = items(tokenizer, num_prompts=50, random_input_len=10, random_range_ratio=ratio)
    assert {item.tokens for item in made} == {10}
    assert len({item.output_tokens for item in made}) > 5


@pytest.mark.parametrize("text", ["1.0", "-0.1", "x", '{"input": 0.1}', "[]"])
def test_an_impossible_range_is_refused(text: str) -> None:
    with pytest.raises(BadValue, match="--random-range-ratio"):
        range_ratios(text)


def test_the_seed_decides_the_prompts(tokenizer: BenchTokenizer) -> None:
    one, same, other = (
        [item.prompt for item in items(tokenizer, num_prompts=5, random_input_len=9, seed=seed)]
        for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other


def test_a_prefix_is_shared_and_adds_to_the_length(tokenizer: BenchTokenizer) -> None:
    made = items(tokenizer, num_prompts=8, random_input_len=10, random_prefix_len=6, send_token_ids=True)
    rows = [item.prompt for item in made]
    assert {len(row) for row in rows} == {16}
    assert len({tuple(row[:7]) for row in rows}) == 1  # [CLS] and the prefix


def test_token_ids_include_the_special_tokens(tokenizer: BenchTokenizer) -> None:
    (item,) = items(tokenizer, num_prompts=1, random_input_len=8, send_token_ids=True)
    assert isinstance(item.prompt, list)
    assert len(item.prompt) == 8
    assert (item.prompt[0], item.prompt[-1]) == (tokenizer.opening[0], tokenizer.closing[0])


def test_batches_combine_prompts_into_requests(tokenizer: BenchTokenizer) -> None:
    made = items(tokenizer, num_prompts=10, random_input_len=8, random_batch_size=4)
    assert [item.rows for item in made] == [4, 4, 2]
    assert [item.tokens for item in made] == [32, 32, 16]


def test_a_ranking_request_has_the_given_length(tokenizer: BenchTokenizer) -> None:
    made = items(
        tokenizer,
        dataset_name=DatasetName.RANDOM_RERANK,
        num_prompts=6,
        random_input_len=40,
        random_batch_size=3,
    )
    assert [item.rows for item in made] == [3, 3]
    assert len({item.query for item in made}) == 1
    query = len(tokenizer.encode([made[0].query or ""], add_special_tokens=False)[0])
    documents = tokenizer.encode([str(text) for text in made[0].prompt], add_special_tokens=False)
    assert all(query + 1 + len(ids) <= 40 for ids in documents)


def test_custom_rows_may_be_texts_lists_objects_or_rankings(
    tmp_path: Path, tokenizer: BenchTokenizer
) -> None:
    file = tmp_path / "rows.jsonl.gz"
    rows: list[dict[str, Any]] = [
        {"prompt": "one"},
        {"prompt": ["one", "two"]},
        {"prompt": {"input": ["a", "b", "c"], "task": "token_embed"}},
        {"query": "q", "documents": ["d", "e"]},
    ]
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    made = items(
        tokenizer,
        dataset_name=DatasetName.CUSTOM,
        dataset_path=str(file),
        num_prompts=4,
        disable_shuffle=True,
    )
    assert [item.rows for item in made] == [1, 2, 3, 2]
    assert made[3].query == "q"


def test_short_data_is_repeated_and_shuffled_by_the_seed(prompts: Path, tokenizer: BenchTokenizer) -> None:
    made = items(tokenizer, dataset_name=DatasetName.CUSTOM, dataset_path=str(prompts), num_prompts=100)
    texts = [item.prompt for item in made]
    assert len(texts) == 100
    assert texts[:40] == texts[40:80]
    assert texts[:40] != [f"the word number {i}" for i in range(40)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"prompt": "a"}\n{broken', "line 2 is not JSON"),
        ('{"prompt": "a"}\n\n[1]', "line 3 is list"),
        ('{"text": "a"}', "line 1: each line needs a `prompt`"),
        ('{"query": "a", "documents": "b"}', "`documents` a list"),
        ("", "no usable prompt"),
    ],
)
def test_errors_name_malformed_lines(
    content: str, said: str, tmp_path: Path, tokenizer: BenchTokenizer
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with pytest.raises(BadValue, match=said):
        items(tokenizer, dataset_name=DatasetName.CUSTOM, dataset_path=str(file))


def test_the_error_names_a_broken_archive(tmp_path: Path, tokenizer: BenchTokenizer) -> None:
    file = tmp_path / "bad.jsonl.gz"
    file.write_bytes(b"not gzip")
    with pytest.raises(BadValue, match="cannot be read"):
        items(tokenizer, dataset_name=DatasetName.CUSTOM, dataset_path=str(file))


def test_rows_can_set_their_output_length(tmp_path: Path, tokenizer: BenchTokenizer) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "a", "output_tokens": 7}\n')
    own: dict[str, Any] = {"dataset_name": DatasetName.CUSTOM, "dataset_path": str(file), "num_prompts": 1}
    assert items(tokenizer, **own, custom_output_len=-1)[0].output_tokens == 7
    assert items(tokenizer, **own, custom_output_len=3)[0].output_tokens == 3
    file.write_text('{"prompt": "a"}\n')
    with pytest.raises(BadValue, match="output_tokens"):
        items(tokenizer, **own, custom_output_len=-1)


def test_parquet_finds_the_text_column_or_takes_a_given_one(
    tmp_path: Path, tokenizer: BenchTokenizer
) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"id": [1, 2], "text": ["a", "b"], "extra": ["x", "y"]}), file)
    base: dict[str, Any] = {
        "dataset_name": DatasetName.PARQUET,
        "dataset_path": str(file),
        "num_prompts": 2,
        "disable_shuffle": True,
    }
    assert [item.prompt for item in items(tokenizer, **base)] == ["a", "b"]
    assert [item.prompt for item in items(tokenizer, **base, dataset_column="extra")] == ["x", "y"]
    with pytest.raises(BadValue, match="no column 'nope'; it has id, text, extra"):
        items(tokenizer, **base, dataset_column="nope")
    with pytest.raises(BadValue, match="not a text"):
        items(tokenizer, **base, dataset_column="id")
    file.write_bytes(b"not parquet")
    with pytest.raises(BadValue, match="not a Parquet file"):
        items(tokenizer, **base)


def test_sharegpt_takes_the_first_turns_without_very_short_and_long_ones(
    tmp_path: Path, tokenizer: BenchTokenizer
) -> None:
    def talk(*turns: str) -> dict[str, Any]:
        return {"conversations": [{"from": "x", "value": turn} for turn in turns]}

    file = tmp_path / "talks.json"
    talks = [
        talk("what is the time", "it is time to go now"),
        talk("alone"),
        talk("a", "b"),
        talk("the " * 1100, "no " * 9),
    ]
    file.write_text(json.dumps(talks))
    made = items(tokenizer, dataset_name=DatasetName.SHAREGPT, dataset_path=str(file), num_prompts=1)
    assert made[0].prompt == "what is the time"
    assert made[0].output_tokens == 8
    file.write_text('{"not": "a list"}')
    with pytest.raises(BadValue, match="ShareGPT"):
        items(tokenizer, dataset_name=DatasetName.SHAREGPT, dataset_path=str(file))


@pytest.mark.parametrize("name", [DatasetName.CUSTOM, DatasetName.SHAREGPT, DatasetName.PARQUET])
def test_the_error_names_a_missing_file(name: DatasetName, tokenizer: BenchTokenizer) -> None:
    with pytest.raises(BadValue, match="needs --dataset-path"):
        items(tokenizer, dataset_name=name)
    with pytest.raises(BadValue, match="there is no such file"):
        items(tokenizer, dataset_name=name, dataset_path="/nowhere/data")


def test_a_file_for_random_data_is_refused(tokenizer: BenchTokenizer, prompts: Path) -> None:
    with pytest.raises(BadValue, match="is generated; to read"):
        items(tokenizer, dataset_path=str(prompts))


def test_the_chat_template_is_applied_to_prompts(tmp_path: Path, tokenizer: BenchTokenizer) -> None:
    tokenizer._rust.save(str(tmp_path / "tokenizer.json"))
    template = (
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}"
    )
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "bos_token": {"content": "<s>"}})
    )
    talking = load_tokenizer(str(tmp_path))
    done = templated([Item("hello"), Item(["left", "alone"])], talking)
    assert done is not None
    assert [item.prompt for item in done] == ["<s><user>hello<bot>", ["left", "alone"]]
    assert templated([Item("hello")], tokenizer) is None


def test_tokens_are_counted_for_every_kind_of_item(tokenizer: BenchTokenizer) -> None:
    given = [
        Item("the word"),
        Item(["the", "word"]),
        Item([1, 2, 3]),
        Item([[1, 2], [3]]),
        Item(["the", "of"], query="word"),
        Item("x", tokens=99),
    ]
    assert count_tokens(given, tokenizer) == [4, 6, 3, 3, 12, 99]


def test_the_error_about_a_missing_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="--tokenizer"):
        load_tokenizer("no-such-model-anywhere")
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    with pytest.raises(BadValue, match="is not a tokenizer"):
        load_tokenizer(str(broken))
