from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.dense import DenseSpec, LayerNormSpec, UnitSpec
from penstock.checkpoint.describe import describe, read_spec
from penstock.checkpoint.pooling import PoolingSpec
from penstock.checkpoint.sparse import SparseSpec
from penstock.config import EngineConfig, PoolerConfig
from penstock.errors import ModelLoadError
from penstock.types import Task
from tests.checkpoints import BERT_CONFIG, write_json, write_modules

TRANSFORMER, POOLING = ("Transformer", ""), ("Pooling", "1_Pooling")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_json(tmp_path / "config.json", BERT_CONFIG)
    return tmp_path


def with_pooling(folder: Path, values: dict[str, Any], *more: tuple[str, str]) -> Path:
    write_modules(folder, [TRANSFORMER, POOLING, *more])
    write_json(folder / "1_Pooling/config.json", values)
    return folder


def with_dense(folder: Path, **values: Any) -> Path:
    with_pooling(folder, {"pooling_mode": "mean"}, ("Dense", "2_Dense"))
    write_json(folder / "2_Dense/config.json", {"in_features": 32, "out_features": 12, "bias": True} | values)
    return folder


def pooling_of(folder: Path, pooler: PoolerConfig | None = None) -> PoolingSpec:
    return read_spec(folder, "m", pooler=pooler).pooling


def test_a_plain_checkpoint_is_mean_pooled_and_not_normalised(folder: Path) -> None:
    spec = read_spec(folder, "plain")
    assert spec.pooling == PoolingSpec(methods=("mean",), normalize=False)
    assert (spec.name, spec.architecture, spec.path) == ("plain", "BertModel", folder)
    assert (spec.embed_dim, spec.vocab_size, spec.max_model_len) == (32, BERT_CONFIG["vocab_size"], 64)
    assert (spec.similarity, spec.prompts, spec.default_prompt_name) == ("cosine", {}, None)
    assert spec.tasks[0] is Task.EMBED
    assert not spec.lower_case


@pytest.mark.parametrize(
    ("flag", "method"),
    [
        ("pooling_mode_cls_token", "cls"),
        ("pooling_mode_max_tokens", "max"),
        ("pooling_mode_mean_tokens", "mean"),
        ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len"),
        ("pooling_mode_weightedmean_tokens", "weighted_mean"),
        ("pooling_mode_lasttoken", "last"),
    ],
)
def test_an_old_flag_turns_on_its_method(folder: Path, flag: str, method: str) -> None:
    flags = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": False, flag: True}
    assert pooling_of(with_pooling(folder, flags)).methods == (method,)


def test_several_old_flags_are_concatenated_in_the_order_of_sentence_transformers(folder: Path) -> None:
    flags = {
        "pooling_mode_lasttoken": True,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_cls_token": True,
        "pooling_mode_max_tokens": True,
    }
    spec = read_spec(with_pooling(folder, flags), "m")
    assert spec.pooling.methods == ("cls", "max", "mean", "last")
    assert spec.embed_dim == 4 * 32


@pytest.mark.parametrize(
    ("mode", "methods"),
    [
        ("cls", ("cls",)),
        ("mean", ("mean",)),
        ("mean_sqrt_len_tokens", ("mean_sqrt_len",)),
        ("weightedmean", ("weighted_mean",)),
        ("lasttoken", ("last",)),
        (["mean", "cls"], ("mean", "cls")),
        (["max"], ("max",)),
    ],
)
def test_the_newer_pooling_mode_is_a_name_or_a_list_in_its_own_order(
    folder: Path, mode: str | list[str], methods: tuple[str, ...]
) -> None:
    assert pooling_of(with_pooling(folder, {"pooling_mode": mode})).methods == methods


def test_the_newer_pooling_mode_wins_over_old_flags(folder: Path) -> None:
    values = {"pooling_mode": "cls", "pooling_mode_mean_tokens": True}
    assert pooling_of(with_pooling(folder, values)).methods == ("cls",)


def test_an_unsupported_pooling_mode_is_refused_with_the_supported_ones(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"'attention' is not supported; supported: cls, max, mean"):
        read_spec(with_pooling(folder, {"pooling_mode": "attention"}), "m")


def test_a_pooling_module_that_turns_nothing_on_is_refused(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="no pooling method"):
        read_spec(with_pooling(folder, {"pooling_mode_mean_tokens": False}), "m")


@pytest.mark.parametrize("include", [True, False])
def test_whether_the_prompt_is_pooled_is_read(folder: Path, include: bool) -> None:
    values = {"pooling_mode": "mean", "include_prompt": include}
    assert pooling_of(with_pooling(folder, values)).include_prompt is include


def test_a_normalize_module_turns_normalising_on(folder: Path) -> None:
    assert pooling_of(with_pooling(folder, {"pooling_mode": "mean"}, ("Normalize", "2_Normalize"))).normalize
    assert not pooling_of(with_pooling(folder, {"pooling_mode": "mean"})).normalize


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("torch.nn.modules.activation.Tanh", "tanh"),
        ("torch.nn.modules.linear.Identity", "identity"),
        ("torch.nn.modules.activation.ReLU", "relu"),
        ("torch.nn.modules.activation.GELU", "gelu"),
        ("torch.nn.modules.activation.Sigmoid", "sigmoid"),
        ("torch.nn.modules.activation.SiLU", "silu"),
    ],
)
def test_a_dense_module_is_read_with_its_activation(folder: Path, written: str, read: str) -> None:
    spec = read_spec(with_dense(folder, activation_function=written), "m")
    assert spec.pooling.modules == (DenseSpec("2_Dense", 32, 12, True, read),)
    assert spec.embed_dim == 12


def test_a_dense_module_may_have_a_residual_and_no_bias(folder: Path) -> None:
    values = {"activation_function": "torch.nn.modules.activation.Tanh", "bias": False, "use_residual": True}
    (dense,) = pooling_of(with_dense(folder, **values)).modules
    assert isinstance(dense, DenseSpec) and dense.residual and not dense.bias


def test_a_dense_module_that_names_no_activation_has_the_reference_default(folder: Path) -> None:
    """sentence-transformers applies tanh unless the file names another activation."""
    (dense,) = pooling_of(with_dense(folder)).modules
    assert isinstance(dense, DenseSpec) and dense.activation == "tanh"


def test_an_unsupported_dense_activation_is_refused_with_the_supported_ones(folder: Path) -> None:
    with pytest.raises(
        ModelLoadError, match=r"'softplus', which is not supported; supported: identity, tanh"
    ):
        read_spec(with_dense(folder, activation_function="torch.nn.modules.activation.Softplus"), "m")


def test_a_dense_module_on_token_vectors_is_refused(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="token_embeddings"):
        read_spec(with_dense(folder, module_input_name="token_embeddings"), "m")


def test_modules_after_the_pooling_keep_their_order(folder: Path) -> None:
    with_dense(folder)
    write_json(folder / "4_LayerNorm/config.json", {"dimension": 12})
    normalize, dense, norm = ("Normalize", "3_Normalize"), ("Dense", "2_Dense"), ("LayerNorm", "4_LayerNorm")
    write_modules(folder, [TRANSFORMER, POOLING, normalize, dense, norm])
    pooling = read_spec(folder, "m").pooling
    assert [type(module) for module in pooling.modules] == [UnitSpec, DenseSpec, LayerNormSpec]
    assert not pooling.normalize
    write_modules(folder, [TRANSFORMER, POOLING, normalize, dense, norm, normalize, ("Dropout", "5")])
    again = read_spec(folder, "m").pooling
    assert again.modules == pooling.modules and again.normalize


def test_a_normalize_module_may_say_that_it_normalises(folder: Path) -> None:
    """Octen's repositories have such a file, which sentence-transformers before 6 does not read."""
    with_pooling(folder, {"pooling_mode": "mean"}, ("Normalize", "2_Normalize"))
    write_json(folder / "2_Normalize/config.json", {"normalize_embeddings": True})
    assert pooling_of(folder).normalize
    write_json(folder / "2_Normalize/config.json", {"normalize_embeddings": False})
    with pytest.raises(ModelLoadError, match="normalize_embeddings = False, which is not supported"):
        read_spec(folder, "m")


@pytest.mark.parametrize("early", [("Dense", "2_Dense"), ("Normalize", "3_Normalize")])
def test_a_module_before_the_pooling_is_refused(folder: Path, early: tuple[str, str]) -> None:
    with_dense(folder)
    write_modules(folder, [TRANSFORMER, early, POOLING])
    with pytest.raises(ModelLoadError, match=f"{early[0]} module {early[1]} before a Pooling module"):
        read_spec(folder, "m")


def test_a_module_that_is_given_vectors_of_another_size_is_refused(folder: Path) -> None:
    with_dense(folder)
    write_json(folder / "4_LayerNorm/config.json", {"dimension": 13})
    write_modules(folder, [TRANSFORMER, POOLING, ("Dense", "2_Dense"), ("LayerNorm", "4_LayerNorm")])
    with pytest.raises(ModelLoadError, match=r"4_LayerNorm reads vectors of 13 numbers, but it is given 12"):
        read_spec(folder, "m")


@pytest.mark.parametrize(("kind", "path"), [POOLING, ("Dense", "2_Dense"), ("Normalize", "3_Normalize")])
def test_a_key_that_no_module_has_is_refused_by_name(folder: Path, kind: str, path: str) -> None:
    with_dense(folder)
    file = folder / path / "config.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    write_json(file, known | {"temperature": 0.5})
    write_modules(folder, [TRANSFORMER, POOLING, *([(kind, path)] if kind != "Pooling" else [])])
    with pytest.raises(ModelLoadError, match=r"temperature, which is not supported; supported: "):
        read_spec(folder, "m")


@pytest.mark.parametrize(
    "kind", ["CNN", "LSTM", "BoW", "WordEmbeddings", "WordWeights", "WeightedLayerPooling"]
)
def test_a_module_that_is_not_supported_is_refused_by_name(folder: Path, kind: str) -> None:
    write_modules(folder, [TRANSFORMER, (kind, "1_Other"), POOLING])
    with pytest.raises(ModelLoadError, match=f"'{kind}', which is not supported; supported: Transformer"):
        read_spec(folder, "m")


def test_several_dense_modules_are_applied_in_order(folder: Path) -> None:
    with_dense(folder)
    write_json(folder / "3_Dense/config.json", {"in_features": 12, "out_features": 5})
    write_modules(folder, [TRANSFORMER, POOLING, ("Dense", "2_Dense"), ("Dense", "3_Dense")])
    spec = read_spec(folder, "m")
    assert [dense.folder for dense in spec.pooling.modules] == ["2_Dense", "3_Dense"]
    assert spec.embed_dim == 5


def test_dropout_changes_nothing_at_inference(folder: Path) -> None:
    assert pooling_of(with_pooling(folder, {"pooling_mode": "cls"}, ("Dropout", "2_Dropout"))).methods == (
        "cls",
    )


def test_an_unsupported_module_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="'WordWeights', which is not supported"):
        read_spec(with_pooling(folder, {"pooling_mode": "mean"}, ("WordWeights", "2_W")), "m")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "{"),
        ("config.json", "[1]"),
        ("modules.json", "{}"),
        ("modules.json", "nonsense"),
        ("1_Pooling/config.json", "{"),
        ("config_sentence_transformers.json", "[]"),
        ("sentence_bert_config.json", "{"),
        ("tokenizer_config.json", "{"),
    ],
)
def test_a_file_with_invalid_json_is_named(folder: Path, file: str, text: str) -> None:
    with_pooling(folder, {"pooling_mode": "mean"})
    (folder / file).write_text(text)
    with pytest.raises(ModelLoadError, match=file.replace(".", r"\.")):
        read_spec(folder, "m")


def test_a_folder_without_config_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"not a model folder: it has no config\.json"):
        read_spec(tmp_path, "m")


def test_a_pooling_module_without_its_config_is_an_error(folder: Path) -> None:
    write_modules(folder, [TRANSFORMER, POOLING])
    with pytest.raises(ModelLoadError, match="1_Pooling"):
        read_spec(folder, "m")


def test_a_config_without_a_size_names_the_missing_key(folder: Path) -> None:
    write_json(folder / "config.json", {key: BERT_CONFIG[key] for key in BERT_CONFIG if key != "vocab_size"})
    with pytest.raises(ModelLoadError, match="vocab_size"):
        read_spec(folder, "m")


def test_the_architecture_falls_back_to_the_model_type(folder: Path) -> None:
    config = {key: BERT_CONFIG[key] for key in BERT_CONFIG if key != "architectures"}
    write_json(folder / "config.json", config)
    assert read_spec(folder, "m").architecture == "bert"
    write_json(folder / "config.json", {key: config[key] for key in config if key != "model_type"})
    with pytest.raises(ModelLoadError, match="neither architectures nor model_type"):
        read_spec(folder, "m")


def test_max_seq_length_lowers_the_limit_but_never_above_the_positions(folder: Path) -> None:
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 20})
    assert read_spec(folder, "m").max_model_len == 20
    assert read_spec(folder, "m").max_positions == 64, "what the weights could take is kept beside it"
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 2000})
    assert read_spec(folder, "m").max_model_len == 64


def test_the_tokenizers_limit_applies_without_max_seq_length(folder: Path) -> None:
    write_json(folder / "tokenizer_config.json", {"model_max_length": 40})
    assert read_spec(folder, "m").max_model_len == 40
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": None})
    assert read_spec(folder, "m").max_model_len == 40
    write_json(folder / "tokenizer_config.json", {"model_max_length": 1000000000000000019884624838656})
    assert read_spec(folder, "m").max_model_len == 64


def test_max_seq_length_wins_over_the_tokenizers_limit(folder: Path) -> None:
    write_json(folder / "tokenizer_config.json", {"model_max_length": 30})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 50})
    assert read_spec(folder, "m").max_model_len == 50


@pytest.mark.parametrize(
    ("name", "pad", "positions"),
    [
        ("RobertaModel", 1, 62),
        ("XLMRobertaModel", 1, 62),
        ("CamembertModel", 1, 62),
        ("mpnet", 1, 62),
        ("BertModel", 0, 64),
    ],
)
def test_families_that_count_positions_after_the_padding_have_that_many_fewer(
    folder: Path, name: str, pad: int, positions: int
) -> None:
    write_json(folder / "config.json", BERT_CONFIG | {"architectures": [name], "pad_token_id": pad})
    assert read_spec(folder, "m").max_positions == positions


def test_options_are_read_from_the_transformer_modules_own_folder(folder: Path) -> None:
    write_modules(folder, [("Transformer", "0_Transformer"), POOLING])
    write_json(folder / "1_Pooling/config.json", {"pooling_mode": "mean"})
    write_json(
        folder / "0_Transformer/sentence_roberta_config.json", {"max_seq_length": 9, "do_lower_case": True}
    )
    spec = read_spec(folder, "m")
    assert (spec.max_model_len, spec.lower_case) == (9, True)


def test_lower_casing_is_read(folder: Path) -> None:
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 20, "do_lower_case": True})
    assert read_spec(folder, "m").lower_case


def test_prompts_default_prompt_and_similarity_are_read(folder: Path) -> None:
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "prompts": {"query": "query: ", "document": "", "old": None},
            "default_prompt_name": "query",
            "similarity_fn_name": "dot",
        },
    )
    spec = read_spec(folder, "m")
    assert spec.prompts == {"query": "query: ", "document": ""}
    assert (spec.default_prompt_name, spec.similarity) == ("query", "dot")


def test_a_similarity_of_null_is_cosine(folder: Path) -> None:
    write_json(folder / "config_sentence_transformers.json", {"similarity_fn_name": None})
    assert read_spec(folder, "m").similarity == "cosine"


def test_overrides_replace_what_the_config_says(folder: Path) -> None:
    spec = read_spec(folder, "m", {"max_position_embeddings": 16, "architectures": ["NewModel"]})
    assert (spec.max_model_len, spec.architecture) == (16, "NewModel")
    assert spec.config["max_position_embeddings"] == 16
    assert spec.config["hidden_size"] == 32


def test_the_pooler_config_overrides_method_and_normalising(folder: Path) -> None:
    with_pooling(folder, {"pooling_mode": ["cls", "mean"]}, ("Normalize", "2_Normalize"))
    spec = read_spec(folder, "m", pooler=PoolerConfig(pooling_type="LAST", normalize=False))
    assert spec.pooling == PoolingSpec(methods=("last",), normalize=False)
    assert spec.embed_dim == 32
    assert pooling_of(folder, PoolerConfig(normalize=False)).methods == ("cls", "mean")


def test_an_unsupported_pooling_type_is_refused_with_the_supported_ones(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"'FIRST' is not supported; supported: cls"):
        pooling_of(folder, PoolerConfig(pooling_type="FIRST"))


SPLADE_MODULES = [("MLMTransformer", ""), ("SpladePooling", "1_SpladePooling")]


def with_splade(folder: Path, **values: Any) -> Path:
    write_json(folder / "config.json", BERT_CONFIG | {"architectures": ["BertForMaskedLM"]})
    write_modules(folder, SPLADE_MODULES)
    write_json(folder / "1_SpladePooling/config.json", values)
    return folder


def test_a_splade_module_makes_sparse_the_first_task(folder: Path) -> None:
    with_splade(folder, pooling_strategy="sum", activation_function="log1p_relu")
    spec = read_spec(folder, "m")
    assert spec.tasks == (Task.SPARSE, Task.EMBED, Task.TOKEN_EMBED)
    assert spec.sparse == SparseSpec("splade", "sum", 2)
    assert spec.width(Task.SPARSE) == BERT_CONFIG["vocab_size"]


@pytest.mark.parametrize("values", [{"pooling_strategy": "mean"}, {"activation_function": "gelu"}])
def test_a_splade_module_with_unsupported_options_is_refused(folder: Path, values: dict[str, str]) -> None:
    with pytest.raises(ModelLoadError, match=next(iter(values.values()))):
        read_spec(with_splade(folder, **values), "m")


def test_splade_is_forced_on_masked_language_models_only(folder: Path) -> None:
    forced = PoolerConfig(pooling_type="SPLADE")
    with pytest.raises(ModelLoadError, match="masked-language"):
        read_spec(folder, "m", pooler=forced)
    overrides = {"architectures": ["BertForMaskedLM"]}
    assert read_spec(folder, "m", overrides).sparse is None
    spec = read_spec(folder, "m", overrides, forced)
    assert spec.sparse == SparseSpec("splade")
    assert spec.pooling.methods == ("mean",), "dense vectors stay what they were"


def test_bge_m3s_sparse_layer_adds_the_sparse_task(folder: Path) -> None:
    (folder / "sparse_linear.pt").write_bytes(b"")
    spec = read_spec(folder, "m")
    assert spec.tasks == (Task.EMBED, Task.TOKEN_EMBED, Task.SPARSE, Task.SCORE)
    assert spec.sparse == SparseSpec("lexical", file="sparse_linear.pt")
    assert spec.width(Task.SPARSE) == 1


def test_a_model_is_described_by_its_folder_name_or_the_name_it_is_served_under(folder: Path) -> None:
    assert describe(EngineConfig(model=str(folder))).name == folder.name
    assert describe(EngineConfig(model=str(folder), served_model_name="mine")).name == "mine"


def test_describing_a_model_does_not_need_its_weights_or_torch(folder: Path) -> None:
    import subprocess

    code = (
        "import sys\n"
        "from penstock.checkpoint.describe import describe\n"
        "from penstock.config import EngineConfig\n"
        f"print(describe(EngineConfig(model={str(folder)!r})).embed_dim)\n"
        "assert 'torch' not in sys.modules\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.stdout.strip(), ran.stderr) == ("32", "")


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 3}, {}, (3,)),
        ({"eos_token_id": 3}, {"eos_token_id": None}, (3,)),
        ({"eos_token_id": [3, 4]}, {"eos_token_id": [5, 3]}, (5, 3, 4)),
        ({}, {}, ()),
    ],
)
def test_end_tokens_of_both_files_end_a_text(
    folder: Path, config: dict[str, Any], generation: dict[str, Any], expected: tuple[int, ...]
) -> None:
    write_json(folder / "config.json", BERT_CONFIG | config)
    write_json(folder / "generation_config.json", generation)
    assert read_spec(folder, "m").eos_token_ids == expected


def test_a_length_that_is_no_number_is_not_one_token(folder: Path) -> None:
    write_json(folder / "tokenizer_config.json", {"model_max_length": True})
    assert read_spec(folder, "m").max_model_len == 64
