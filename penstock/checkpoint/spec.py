"""What a model's files say about it: architecture, limits, pooling, prompts.

Reads `config.json`, `modules.json` and the files they point to, directly; free of torch, so that an
API process learns everything it needs about a model without loading it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.checkpoint.dense import DenseSpec, read_dense
from penstock.checkpoint.files import integer, optional_json, read_json
from penstock.checkpoint.find import find, served_name
from penstock.checkpoint.late import MASK_MODULE, LateSpec, read_late
from penstock.checkpoint.score import MARK_DIM, ScoreSpec, read_score
from penstock.config import EngineConfig, PoolerConfig
from penstock.errors import ModelLoadError
from penstock.types import Task

# The order in which sentence-transformers joins several methods of the old flags.
_OLD_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
# Class names or model types of decoders begin so, and of those among them whose tokens see all others.
_DECODERS = (
    *("gemma", "gpt2", "gritlm", "jinaforranking", "llama", "ministral", "mistral", "phi3", "qwen2", "qwen3"),
)
_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit
_LOOK_AHEAD = ("gritlm", "llamabidirectional", "llama_bidirec")
_GRITLM_MARK = "<|embed|>\n"
_GRITLM_TEMPLATE = "<|user|>\n{instruction}\n" + _GRITLM_MARK
_METHOD_NAMES = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "avg": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "mean_sqrt_len": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "weighted_mean": "weighted_mean",
    "lasttoken": "last",
    "last": "last",
}
POOLING_METHODS = tuple(dict.fromkeys(_METHOD_NAMES.values()))
_TRANSFORMERS = ("Transformer", "MLMTransformer")
_KNOWN_MODULES = (
    *_TRANSFORMERS,
    "Pooling",
    "SpladePooling",
    "Dense",
    "Normalize",
    "Dropout",
    "LogitScore",
    MASK_MODULE,
)
_REWARD_MODELS = ("ForRewardModel", "ForProcessRewardModel")
_STEP = "step"  # a pooling type that adds rewards of steps
_STEP_TAG = "<extra_0>"  # what process reward models end a step with, unless told
_SPLADE = "splade"  # a pooling type that adds a task to a masked-language model
_LEXICAL = "sparse_linear"  # BGE-M3's layers, each a file of its own
_MULTI_VECTOR = "colbert_linear"


class PoolingSpec(msgspec.Struct, frozen=True):
    methods: tuple[str, ...]  # several are concatenated
    include_prompt: bool = True
    dense: tuple[DenseSpec, ...] = ()
    normalize: bool = False
    after: str | None = None  # the mean begins behind this mark in the text


class SparseSpec(msgspec.Struct, frozen=True):
    """How a model makes sparse weights.

    splade: log(1 + relu) of the vocabulary's logits, the `reduce` over the row's tokens; `logs` 2 takes
    the logarithm twice. lexical: a weight for each given token, from the layer in `file`.
    """

    kind: Literal["splade", "lexical"]
    reduce: Literal["max", "sum"] = "max"
    logs: int = 1
    file: str = ""


class RewardSpec(msgspec.Struct, frozen=True):
    """What a reward model judges: the whole text, or each of its steps."""

    steps: bool = False
    tag: int | None = None  # the token that ends a step


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    folder: str
    name: str
    architecture: str
    config: dict[str, Any]
    overrides: dict[str, Any] = msgspec.field(default_factory=dict)  # what of it was given by the caller
    limit: int  # most tokens of a row, special tokens included
    positions: int  # the same as far as the weights go; `--max-model-len` may raise `limit` to it
    embed_dim: int
    token_dim: int
    vocab_size: int
    pooling: PoolingSpec
    prompts: dict[str, str]
    default_prompt_name: str | None
    similarity: str
    lower_case: bool
    tasks: tuple[Task, ...]
    labels: tuple[str, ...] = ()
    causal: bool = False  # no token sees one that comes after it
    instruction_template: str | None = None  # with {instruction}, what goes before a text
    sparse: SparseSpec | None = None
    reward: RewardSpec | None = None
    adapters: tuple[str, ...] = ()  # of which a request may choose one
    multi_vector: str | None = (
        None  # BGE-M3's file with the layer behind its token vectors; the first has none
    )
    late: LateSpec | None = None  # a vector a token, compared token by token
    score: ScoreSpec | None = None  # of models that read a query and a document together
    eos_token_ids: tuple[int, ...] = ()  # which end what is generated

    @property
    def generates(self) -> bool:
        return Task.GENERATE in self.tasks

    @property
    def shares_prefixes(self) -> bool:
        """Whether rows are expected to begin alike: a causal reranker's do, with instruction and query."""
        return self.causal and self.score is not None and not self.score.marks

    @property
    def why_not_cut(self) -> str | None:
        """Why a row cannot be spread over steps, if so."""
        if not self.causal:
            return f"{self.architecture} looks ahead: a token's state needs the tokens after it"
        if self.pooling.methods in (("last",), ("mean",), ("mean_sqrt_len",)):
            return None
        return f"{' + '.join(self.pooling.methods)} pooling needs the whole row at once"

    @property
    def score_kind(self) -> Literal["cross", "list", "bi", "late"] | None:
        """How queries and documents are scored: read in pairs or as a list, by one vector each, or token by
        token."""
        if Task.SCORE not in self.tasks:
            return None
        if self.late is not None:
            return "late"
        if self.score is None:
            return "bi"
        return "list" if self.score.marks else "cross"

    @property
    def step_tag(self) -> int:
        """The token that ends a step, of models that judge steps."""
        assert self.reward is not None and self.reward.tag is not None, "this model judges no steps"
        return self.reward.tag

    @property
    def path(self) -> Path:
        return Path(self.folder)

    def width(self, task: Task) -> int:
        """How many numbers a row of this task has."""
        if task is Task.EMBED:
            return self.embed_dim
        if task is Task.SPARSE:
            return 1 if self.sparse is not None and self.sparse.kind == "lexical" else self.vocab_size
        if task is Task.SCORE:
            return MARK_DIM if self.score is not None and self.score.marks else 1
        return self.token_dim if task is Task.TOKEN_EMBED else len(self.labels)


def describe(config: EngineConfig) -> ModelSpec:
    """Find the model and read everything that its files say."""
    folder = find(config.model, config.revision)
    name = config.served_model_name or served_name(config.model)
    spec = read_spec(folder, name, config.hf_overrides, config.pooler_config, config.score_template)
    if config.model_impl == "transformers":  # its hidden states, but neither its heads nor its cache
        embeds = spec.tasks[0] is Task.EMBED
        tasks = (Task.EMBED, Task.TOKEN_EMBED, *([Task.SCORE] if embeds else []))
        plain = {"tasks": tasks, "causal": False, "score": None}
        if spec.late is not None:
            hidden = spec.late.dense[0].in_features if spec.late.dense else spec.token_dim
            plain |= {"late": None, "token_dim": hidden}
        return msgspec.structs.replace(spec, **plain)
    return with_generation(spec, config.enable_generation)


def with_generation(spec: ModelSpec, wanted: bool | None) -> ModelSpec:
    """Models generate if they can and nothing says that they are for something else, or if told to."""
    why_not = why_not_generate(spec)
    if wanted is None:
        grit = spec.architecture == "GritLM"
        wanted = why_not is None and (
            grit or (not (spec.path / "modules.json").is_file() and spec.score is None)
        )
    if not wanted:
        return spec
    if why_not is not None:
        raise ModelLoadError(f"enable_generation cannot be used: {why_not}", param="enable_generation")
    return msgspec.structs.replace(spec, tasks=(*spec.tasks, Task.GENERATE))


def why_not_generate(spec: ModelSpec) -> str | None:
    """Why a checkpoint cannot generate, if so."""
    if spec.config.get("tie_word_embeddings") is False and not _has_head(spec.path):
        return "the checkpoint has no lm_head.weight, and its words are not tied to it"
    if spec.architecture == "GritLM":
        return None
    if not spec.architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return f"{spec.architecture} has no language-model head"
    if not spec.causal:
        return f"{spec.architecture} looks ahead"
    return None


def _has_head(folder: Path) -> bool:
    """Some are saved without the head that their architecture has. Without weights there is no telling."""
    if (where := optional_json(folder / "model.safetensors.index.json").get("weight_map")) is not None:
        return "lm_head.weight" in where
    file = folder / "model.safetensors"
    if not file.is_file():
        return True
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        return b'"lm_head.weight"' in opened.read(min(size, _LONGEST_HEADER))


def read_spec(
    folder: Path,
    name: str,
    overrides: dict[str, Any] | None = None,
    pooler: PoolerConfig | None = None,
    score_template: str | None = None,
) -> ModelSpec:
    pooler = pooler or PoolerConfig()
    config = read_json(folder / "config.json") | (overrides or {})
    architecture = _architecture(folder, config)
    modules = _modules(folder)
    transformer = _transformer_options(folder, modules)
    table = optional_json(folder / "config_sentence_transformers.json")
    hidden = integer(config, "hidden_size", "n_embd", "dim", "d_model")
    late = read_late(folder, config, modules, table, transformer, overrides or {}, hidden)
    pooling = _forced(_pooling(folder, modules, architecture, config, late), pooler)
    sparse = _sparse(folder, modules, architecture, pooler)
    score = read_score(
        folder,
        modules,
        architecture,
        config,
        label_count(config),
        template=score_template,
        score_labels=pooler.score_labels,
    )
    causal = architecture.lower().startswith(_DECODERS) and is_causal(architecture, config)
    if late is not None and causal:
        raise ModelLoadError(f"late interaction is not supported on {architecture}, which is causal")
    embed_dim = pooling.dense[-1].out_features if pooling.dense else hidden * len(pooling.methods)
    positions = positions_of(config)
    prompts = {str(key): str(text) for key, text in (table.get("prompts") or {}).items() if text is not None}
    return ModelSpec(
        folder=str(folder),
        name=name,
        architecture=architecture,
        config=config,
        overrides=overrides or {},
        limit=_limit(positions, folder, transformer),
        positions=positions,
        embed_dim=embed_dim,
        token_dim=hidden if late is None else late.dim,
        vocab_size=integer(config, "vocab_size"),
        pooling=pooling,
        prompts=prompts,
        default_prompt_name=table.get("default_prompt_name"),
        similarity=table.get("similarity_fn_name") or "cosine",
        lower_case=bool(transformer.get("do_lower_case", False)),
        tasks=_tasks(architecture, config, sparse, score) if late is None else _late_tasks(modules),
        labels=_labels(architecture, config),
        sparse=sparse,
        multi_vector=_beside(folder, _MULTI_VECTOR) if sparse is not None and late is None else None,
        score=score,
        reward=_reward(folder, architecture, config, pooler),
        late=late,
        adapters=adapter_names(config),
        instruction_template=_GRITLM_TEMPLATE if architecture == "GritLM" else None,
        causal=causal,
        eos_token_ids=_eos(folder, config),
    )


def _eos(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """What ends a text: generation_config.json's word, else config.json's."""
    found = optional_json(folder / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    if found is None:
        return ()
    return tuple(int(token) for token in (found if isinstance(found, list) else [found]))


def _tasks(
    architecture: str, config: Mapping[str, Any], sparse: SparseSpec | None, score: ScoreSpec | None
) -> tuple[Task, ...]:
    """What the weights allow; the task that the checkpoint was trained for stands first.

    Scores come from models that read pairs, and from embedders, which compare vectors.
    """
    if sparse is not None and sparse.kind == "splade":
        return (Task.SPARSE, Task.EMBED, Task.TOKEN_EMBED)
    if sparse is not None:
        return (Task.EMBED, Task.TOKEN_EMBED, Task.SPARSE, Task.SCORE)
    if score is not None and (score.tokens or score.marks):
        return (Task.SCORE, Task.EMBED, Task.TOKEN_EMBED)
    if architecture.endswith("ForSequenceClassification"):
        scores = () if score is None else (Task.SCORE,)
        judged = (Task.REWARD,) if label_count(config) == 1 else ()
        return (Task.CLASSIFY, *scores, *judged, Task.EMBED, Task.TOKEN_EMBED)
    if architecture.endswith(_REWARD_MODELS):
        return (Task.REWARD, Task.EMBED, Task.TOKEN_EMBED)
    if architecture.endswith("ForTokenClassification"):
        return (Task.TOKEN_CLASSIFY, Task.EMBED, Task.TOKEN_EMBED)
    return (Task.EMBED, Task.TOKEN_EMBED, Task.SCORE)


def _late_tasks(modules: list[tuple[str, str]]) -> tuple[Task, ...]:
    """A vector for the whole text only where the files say how it is pooled."""
    pooled = (Task.EMBED,) if any(kind == "Pooling" for kind, _ in modules) else ()
    return (Task.TOKEN_EMBED, *pooled, Task.SCORE)


def adapter_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """jina-embeddings-v3's task adapters; none is left to choose where one is merged."""
    if config.get("lora_task") is not None:
        return ()
    return tuple(map(str, config.get("lora_adaptations") or ()))


def label_count(config: Mapping[str, Any], otherwise: int = 2) -> int:
    """How many outputs a classifier has: as many as there are labels, `otherwise` if nothing is said."""
    return int(config.get("num_labels") or len(config.get("id2label") or ()) or otherwise)


def reward_labels(config: Mapping[str, Any]) -> int:
    """A reward is one number; that of a step says how likely it is wrong and right."""
    process = str((config.get("architectures") or [""])[0]).endswith("ForProcessRewardModel")
    return label_count(config, otherwise=2 if process else 1)


def _labels(architecture: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    names = config.get("id2label") or {}
    rewards = architecture.endswith(_REWARD_MODELS)
    count = reward_labels(config) if rewards else label_count(config)
    return tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count))


def _reward(
    folder: Path, architecture: str, config: Mapping[str, Any], pooler: PoolerConfig
) -> RewardSpec | None:
    """Process reward models judge steps, whose tag they name or the caller does."""
    steps = architecture.endswith("ForProcessRewardModel") or _is(pooler, _STEP)
    judges = architecture.endswith((*_REWARD_MODELS, "ForSequenceClassification"))
    if _is(pooler, _STEP) and not judges:
        raise ModelLoadError(f"{architecture} has no head that judges steps", param="pooler_config")
    if not judges:
        return None
    tag = pooler.step_tag_id if pooler.step_tag_id is not None else _token_id(folder, _STEP_TAG)
    if steps and tag is None:
        raise ModelLoadError(
            f"STEP pooling needs step_tag_id in the pooler config: the tokenizer has no {_STEP_TAG}",
            param="pooler_config",
        )
    return RewardSpec(steps, tag if steps else None)


def _token_id(folder: Path, token: str) -> int | None:
    """The id of an added token, without loading the tokenizer."""
    for entry in optional_json(folder / "tokenizer.json").get("added_tokens") or ():
        if entry.get("content") == token:
            return int(entry["id"])
    return None


def _architecture(folder: Path, config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    if names:
        return str(names[0])
    if kind := config.get("model_type"):
        return str(kind)
    raise ModelLoadError(f"{folder / 'config.json'} names neither architectures nor model_type")


def _modules(folder: Path) -> list[tuple[str, str]]:
    """The sentence-transformers modules as (short type, folder), or none for a plain checkpoint."""
    file = folder / "modules.json"
    if not file.is_file():
        return []
    try:
        rows = msgspec.json.decode(file.read_bytes(), type=list[dict[str, Any]])
    except msgspec.DecodeError as error:
        raise ModelLoadError(f"{file} is not a list of modules: {error}") from None
    modules = [(str(row.get("type", "")).rsplit(".", 1)[-1], str(row.get("path", ""))) for row in rows]
    for kind, _ in modules:
        if kind not in _KNOWN_MODULES:
            raise ModelLoadError(
                f"{file} has a module {kind!r}, which is not supported; known: {', '.join(_KNOWN_MODULES)}"
            )
    return modules


def _transformer_options(folder: Path, modules: list[tuple[str, str]]) -> dict[str, Any]:
    places = [folder / path for kind, path in modules if kind in _TRANSFORMERS] or [folder]
    kinds = ("bert", "roberta", "xlm-roberta", "distilbert", "camembert")
    names = [f"sentence_{kind}_config.json" for kind in kinds]
    for place in places:
        for name in names:
            if (place / name).is_file():
                return read_json(place / name)
    return {}


def is_causal(architecture: str, config: Mapping[str, Any]) -> bool:
    """Whether a decoder's tokens see only those before them: config.json's word, else its family's way."""
    if (causal := _flag(config, "is_causal")) is not None:
        return causal
    if (ahead := _flag(config, "use_bidirectional_attention")) is not None:
        return not ahead
    return not architecture.lower().startswith(_LOOK_AHEAD)


def _flag(config: Mapping[str, Any], name: str) -> bool | None:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelLoadError(f"{name} in config.json is {value!r}; it has to be true or false")
    return value


def _plain_pooling(architecture: str, config: Mapping[str, Any]) -> PoolingSpec:
    """What a checkpoint without modules is pooled with: decoders as their embedding models are trained."""
    if not architecture.lower().startswith(_DECODERS):
        return PoolingSpec(methods=("mean",), normalize=False)
    method = "last" if is_causal(architecture, config) else pooling_method(str(config.get("pooling", "mean")))
    after = _GRITLM_MARK if architecture == "GritLM" and method == "mean" else None
    return PoolingSpec(methods=(method,), normalize=True, after=after)


def _pooling(
    folder: Path,
    modules: list[tuple[str, str]],
    architecture: str,
    config: Mapping[str, Any],
    late: LateSpec | None = None,
) -> PoolingSpec:
    if not modules:
        return _plain_pooling(architecture, config)
    methods: tuple[str, ...] = ("mean",)
    include_prompt, normalize, dense = True, False, []
    for kind, path in modules:
        if kind == "Pooling":
            values = read_json(folder / path / "config.json")
            methods, include_prompt = _methods(values), bool(values.get("include_prompt", True))
        elif kind == "Dense" and late is None:  # of a late-interaction model they project the tokens
            if normalize:
                raise ModelLoadError(f"{path}: a Dense module after Normalize is not supported")
            dense.append(read_dense(folder, path))
        elif kind == "Normalize":
            normalize = True
    return PoolingSpec(methods, include_prompt, tuple(dense), normalize)


def _methods(values: dict[str, Any]) -> tuple[str, ...]:
    if (mode := values.get("pooling_mode")) is not None:
        wanted = [mode] if isinstance(mode, str) else list(mode)
        return tuple(pooling_method(str(name)) for name in wanted)
    if found := tuple(method for flag, method in _OLD_FLAGS.items() if values.get(flag)):
        return found
    raise ModelLoadError("the Pooling module's config.json turns on no pooling method")


def pooling_method(name: str) -> str:
    key = name.lower()
    if key not in _METHOD_NAMES:
        raise ModelLoadError(
            f"pooling method {name!r} is unknown; known: {', '.join(POOLING_METHODS)}, {_SPLADE}, {_STEP}"
        )
    return _METHOD_NAMES[key]


def _sparse(
    folder: Path, modules: list[tuple[str, str]], architecture: str, pooler: PoolerConfig
) -> SparseSpec | None:
    places = [folder / path for kind, path in modules if kind == "SpladePooling"]
    if places or _is(pooler, _SPLADE):
        if not architecture.endswith(("ForMaskedLM", "ForPreTraining")):
            raise ModelLoadError(
                f"{architecture} has no weights for SPLADE, which needs a masked-language model",
                param="model",
            )
        return _splade(read_json(places[0] / "config.json")) if places else SparseSpec("splade")
    file = _beside(folder, _LEXICAL)
    if file is None or not architecture.endswith(("Model", "ForMaskedLM")):
        return None
    return SparseSpec("lexical", file=file)


def _beside(folder: Path, name: str) -> str | None:
    names = (f"{name}.safetensors", f"{name}.pt")
    return next((file for file in names if (folder / file).is_file()), None)


def _is(pooler: PoolerConfig, kind: str) -> bool:
    return pooler.pooling_type is not None and pooler.pooling_type.lower() == kind


def _splade(values: dict[str, Any]) -> SparseSpec:
    strategy, activation = values.get("pooling_strategy", "max"), values.get("activation_function", "relu")
    if strategy not in ("max", "sum"):
        raise ModelLoadError(f"SPLADE's pooling_strategy {strategy!r} is not supported; known: max, sum")
    logs = {"relu": 1, "log1p_relu": 2}
    if activation not in logs:
        raise ModelLoadError(
            f"SPLADE's activation_function {activation!r} is not supported; known: {', '.join(logs)}"
        )
    return SparseSpec("splade", strategy, logs[activation])


def _forced(pooling: PoolingSpec, forced: PoolerConfig) -> PoolingSpec:
    if forced.pooling_type is not None and not _is(forced, _SPLADE) and not _is(forced, _STEP):
        pooling = msgspec.structs.replace(pooling, methods=(pooling_method(forced.pooling_type),))
    if forced.normalize is not None:
        pooling = msgspec.structs.replace(pooling, normalize=forced.normalize)
    return pooling


def with_limit(spec: ModelSpec, limit: int) -> ModelSpec:
    """The model as it is served, with the limit that was settled on."""
    return msgspec.structs.replace(spec, limit=limit)


def positions_of(config: Mapping[str, Any]) -> int:
    if config.get("model_type") == "nomic_bert":
        return _nomic_positions(config)
    positions = integer(config, "max_position_embeddings", "n_positions")
    if config.get("model_type") in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        positions -= int(config.get("pad_token_id", 1)) + 1  # these count positions from pad + 1
    return positions


def _nomic_positions(config: Mapping[str, Any]) -> int:
    """With a scaling factor, angles beyond the trained length would depend on the length of each text."""
    positions = integer(config, "n_positions", "max_position_embeddings")
    if config.get("rotary_scaling_factor") is None:
        return positions
    return min(positions, int(config.get("max_trained_positions") or positions))


def _limit(positions: int, folder: Path, transformer: dict[str, Any]) -> int:
    """What the model is meant for: the smallest of positions, sentence-transformers, tokenizer."""
    if isinstance(transformer.get("max_seq_length"), int):
        return min(positions, int(transformer["max_seq_length"]))
    meant = optional_json(folder / "tokenizer_config.json").get("model_max_length")
    if isinstance(meant, int) and meant < 1_000_000:
        return min(positions, meant)
    return positions
