"""`ModelSpec`: everything that a model's files say about it.

Reads `config.json`, `modules.json` and the files that they point to. Free of torch, so that an API process
learns what it needs about a model without loading it. Each part of the description has its own module;
this one puts them together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.checkpoint.adapters import adapter_names
from penstock.checkpoint.families import (
    COLBERT_CLASS,
    Architecture,
    Family,
    find_architecture,
    read_architecture,
    text_tower,
)
from penstock.checkpoint.files import (
    CheckpointFiles,
    Layout,
    mapping,
    optional_integer,
    optional_json,
    read_files,
    shown,
    usable_values,
)
from penstock.checkpoint.find import find, served_name
from penstock.checkpoint.generation import eos_token_ids, why_not_generate
from penstock.checkpoint.gliclass import ZeroShotSpec, encoder_config, read_zero_shot
from penstock.checkpoint.gliner import EntitySpec, is_gliner, read_entities, read_model_config
from penstock.checkpoint.identity import read_identity
from penstock.checkpoint.keys import check_keys
from penstock.checkpoint.labels import label_count, label_names
from penstock.checkpoint.late import COLBERT_DIM, LateSpec, read_late
from penstock.checkpoint.layout import QueryRoute, read_layout
from penstock.checkpoint.limits import any_max_positions, max_model_len, max_positions
from penstock.checkpoint.pooling import PoolingSpec, check_widths, read_pooling, static_pooling
from penstock.checkpoint.quantization import stored_format, with_quantization
from penstock.checkpoint.reward import RewardSpec, read_reward
from penstock.checkpoint.score import MARK_DIM, ScoreSpec, read_score, why_not_score
from penstock.checkpoint.sizes import ModelSizes, check_any_sizes, read_sizes, table_sizes
from penstock.checkpoint.sparse import SparseSpec, multi_vector_file, read_sparse
from penstock.checkpoint.static import ARCHITECTURE as STATIC_ARCHITECTURE
from penstock.checkpoint.static import MAX_TOKENS as MAX_STATIC_TOKENS
from penstock.checkpoint.static import (
    StaticSpec,
    is_static,
    names_static,
    normalizes,
    read_static,
    static_length,
)
from penstock.checkpoint.unsupported import why_no_config
from penstock.config import EngineConfig, ModelFacts, PoolerConfig
from penstock.errors import ModelLoadError
from penstock.types import Task

_LABELLED = frozenset({Task.ENTITIES, Task.ZERO_SHOT})  # tasks whose labels come with the request


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    folder: str  # holds the config.json, tokenizer and weights of the model itself
    root: str = ""  # holds modules.json; the folders of modules are below it. "": the same as `folder`
    name: str
    architecture: str
    config: dict[str, Any]
    overrides: dict[str, Any] = msgspec.field(default_factory=dict)  # the part of `config` from the caller
    max_model_len: int  # tokens of one row, special tokens included
    max_positions: int  # what the weights allow; `--max-model-len` may raise `max_model_len` to it
    hidden_size: int | None = None
    num_layers: int | None = None
    embed_dim: int
    token_dim: int
    vocab_size: int
    num_segments: int = 0  # token types that the model tells apart
    pooling: PoolingSpec
    prompts: dict[str, str]
    default_prompt_name: str | None
    similarity: str
    lower_case: bool
    tasks: tuple[Task, ...]
    labels: tuple[str, ...] = ()
    is_causal: bool = False  # no token sees a later one
    instruction_template: str | None = None  # with {instruction}; precedes a text
    text_end: str = ""  # follows every text before it is tokenised
    sparse: SparseSpec | None = None
    reward: RewardSpec | None = None
    adapters: tuple[str, ...] = ()  # a request may choose one of them
    requires_adapter: bool = False  # a request has to
    multi_vector: str | None = None  # BGE-M3's file with the projection of its token vectors
    static: StaticSpec | None = None  # a table of token vectors, without a model behind it
    query_route: QueryRoute | None = None  # how queries are read, where a Router sends them elsewhere
    late: LateSpec | None = None  # one vector per token, compared token by token
    score: ScoreSpec | None = None  # for models that read a query and a document together
    entities: EntitySpec | None = None  # for models that find entities of labels in the request
    zero_shot: ZeroShotSpec | None = None  # for models that classify by labels in the request
    why_not_score: str | None = None  # of a model that could compare vectors, but is not known to embed
    eos_token_ids: tuple[int, ...] = ()  # end a generated text
    why_not_generate: str | None = "no checkpoint was read"  # None: it can
    generates_by_default: bool = False

    @property
    def generates(self) -> bool:
        return Task.GENERATE in self.tasks

    @property
    def reads_labels(self) -> bool:
        """Whether its labels come with the request."""
        return not _LABELLED.isdisjoint(self.tasks)

    @property
    def is_unmarked(self) -> bool:
        """Whether nothing says that its vectors mean anything."""
        return self.why_not_score is not None and Task.EMBED in self.tasks

    @property
    def shares_prefixes(self) -> bool:
        """Whether rows are expected to begin with the same tokens. Those of a causal reranker do: they begin
        with the instruction and the query."""
        return self.is_causal and self.score is not None and not self.score.marks

    @property
    def why_not_chunked(self) -> str | None:
        """Why a row cannot be spread over several steps; None if it can."""
        if not self.is_causal:
            return f"{self.architecture} is not causal: a token's state depends on later tokens"
        if Task.SPARSE in self.tasks:
            return "sparse weights need the whole row in one step"
        if (why := find_architecture(self.architecture, self.config).family.why_whole_rows) is not None:
            return f"{self.architecture} runs a row in one step: {why}"
        if self.late is not None:
            return "late interaction needs the whole row in one step"
        if self.pooling.methods in (("last",), ("mean",), ("mean_sqrt_len",)):
            return None
        return f"{' + '.join(self.pooling.methods)} pooling needs the whole row in one step"

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(
            max_model_len=self.max_model_len,
            max_positions=self.max_positions,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            why_not_chunked=self.why_not_chunked,
            shares_prefixes=self.shares_prefixes,
            generates=self.generates,
            is_static=self.static is not None,
        )

    @property
    def sizes(self) -> ModelSizes:
        """The sizes of a native model's parts."""
        if self.static is not None:
            return table_sizes(self.static.vocab_size, self.static.dim)
        family = find_architecture(self.architecture, self.config).family
        return read_sizes(self.path / "config.json", family, self.config)

    @property
    def score_kind(self) -> Literal["cross", "list", "bi", "late"] | None:
        """How queries and documents are scored: read together in pairs or as a list, by one vector each, or
        token by token."""
        if Task.SCORE not in self.tasks:
            return None
        if self.late is not None:
            return "late"
        if self.score is None:
            return "bi"
        return "list" if self.score.marks else "cross"

    @property
    def step_tag(self) -> int:
        """The token that ends a step, for models that judge steps."""
        if self.reward is None or self.reward.tag is None:
            raise ValueError(f"{self.architecture} judges no steps")
        return self.reward.tag

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @property
    def root_path(self) -> Path:
        return Path(self.root or self.folder)

    def width(self, task: Task) -> int:
        """How many numbers an output row of this task has."""
        if task is Task.EMBED:
            return self.embed_dim
        if task is Task.SPARSE:
            return 1 if self.sparse is not None and self.sparse.kind == "lexical" else self.vocab_size
        if task is Task.SCORE:
            return MARK_DIM if self.score is not None and self.score.marks else 1
        if task is Task.ENTITIES and self.entities is not None:
            return self.entities.outputs_per_label  # for each label
        if task is Task.ZERO_SHOT:
            return 1  # for each label
        return self.token_dim if task is Task.TOKEN_EMBED else len(self.labels)


def describe(config: EngineConfig) -> ModelSpec:
    """Find the model and read everything that its files say."""
    folder = find(config.model, config.revision, config.download_dir)
    native = config.model_impl != "transformers"
    with usable_values(folder):
        spec = read_spec(
            folder,
            config.served_model_name or served_name(config.model),
            config.hf_overrides,
            config.pooler_config,
            config.score_template,
            native=native,
        )
    if not native and spec.reads_labels:
        raise ModelLoadError(
            f"model_impl is transformers, which has no {spec.architecture}; leave --model-impl out",
            param="model_impl",
        )
    return with_generation(spec, config.enable_generation) if native else _run_by_transformers(spec)


def read_spec(
    folder: Path,
    name: str,
    overrides: dict[str, Any] | None = None,
    pooler: PoolerConfig | None = None,
    score_template: str | None = None,
    *,
    native: bool = True,
) -> ModelSpec:
    """`native`: an architecture without a family record is refused before anything else is read."""
    pooler = pooler or PoolerConfig()
    overrides = overrides or {}
    _check_architecture(folder / "config.json", overrides, native=native)
    layout, query_route = read_layout(folder)
    if is_static(layout):
        if not native:
            raise ModelLoadError(
                f"{folder} holds static embeddings, which --model-impl transformers cannot run; leave it out",
                param="model_impl",
            )
        return _static_spec(layout, name, overrides, pooler)
    config_file = layout.folder / "config.json"
    if not config_file.is_file() and not is_gliner(folder):
        raise ModelLoadError(f"{folder} is not a model folder: {why_no_config(folder)}", param="model")
    config = read_model_config(layout.folder) | overrides
    architecture = read_architecture(config_file, config, native=native)
    if native:
        config = with_quantization(layout.folder, text_tower(architecture, config_file, config))
    if Task.ZERO_SHOT in architecture.family.heads:
        config = encoder_config(config_file, config)
    family = architecture.family
    files = read_files(layout, config, overrides)
    if native:
        read_sizes(config_file, family, config)
        check_keys(config_file, family, config)
        stored_format(config)  # refuses formats that are not supported
    else:
        check_any_sizes(config_file, architecture, config)
    hidden_size = files.integer(*family.keys.hidden_size)
    width = files.integer(*family.keys.output_size, *family.keys.hidden_size)
    late = read_late(files, architecture, width)
    pooling = read_pooling(files, architecture, pooler, is_late=late is not None)
    sparse = read_sparse(files, architecture, pooler)
    identity = read_identity(folder, name, config)
    score = read_score(
        files, architecture, identity, template=score_template, score_labels=pooler.score_labels
    )
    unknown = why_not_score(files, architecture, identity)
    if score is not None or pooler.pooling_type is not None:
        unknown = None
    is_causal = family.is_causal(config)
    if is_causal and architecture.is_masked_language_model and config.get("is_causal") is None:
        raise ModelLoadError(
            f"{architecture.name} predicts masked tokens, but {config_file} does not say whether tokens see "
            "later ones; set is_causal to true or false with --hf-overrides",
            param="model",
        )
    if query_route is not None and (sparse is None or sparse.kind != "splade"):
        raise ModelLoadError(
            f"{folder} sends queries through SparseStaticEmbedding, but documents through no SpladePooling, "
            "which is not supported",
            param="model",
        )
    positions = max_positions(family, config, config_file) if native else any_max_positions(files, family)
    found_tasks = _scoring(_tasks(files, architecture, sparse, score), unknown)
    if late is not None:
        found_tasks = _late_tasks(files)
    return ModelSpec(
        folder=str(layout.folder),
        root=str(layout.root),
        name=name,
        architecture=architecture.name,
        config=config | ({COLBERT_DIM: late.dim} if late is not None and architecture.is_colbert else {}),
        overrides=overrides,
        max_model_len=max_model_len(files, positions, family.trained_row_length),
        max_positions=positions,
        hidden_size=hidden_size,
        num_layers=optional_integer(config, *family.keys.num_layers),
        embed_dim=check_widths(files, pooling, width * len(pooling.methods)),
        token_dim=width if late is None else late.dim,
        vocab_size=files.integer("vocab_size"),
        num_segments=_num_segments(config, family),
        pooling=pooling,
        prompts=_prompts(files),
        default_prompt_name=_text(files, "default_prompt_name"),
        similarity=_text(files, "similarity_fn_name") or "cosine",
        lower_case=bool(files.transformer.get("do_lower_case", False)),
        tasks=(Task.SPARSE,) if query_route is not None else found_tasks,
        why_not_score=unknown,
        labels=() if family.heads & _LABELLED else label_names(architecture, config),
        entities=read_entities(config),
        zero_shot=read_zero_shot(config),
        sparse=sparse,
        multi_vector=multi_vector_file(files.folder) if sparse is not None and late is None else None,
        score=score,
        reward=read_reward(files, architecture, pooler),
        late=late,
        adapters=(adapters := adapter_names(config, family.adapters_key)),
        requires_adapter=family.requires_adapter and bool(adapters),
        instruction_template=family.instruction_template,
        text_end=_eos_text(files) if family.appends_eos else "",
        is_causal=is_causal,
        eos_token_ids=eos_token_ids(files),
        why_not_generate=why_not_generate(files.folder, architecture, config),
        generates_by_default=family.generates_by_default
        or (not files.modules and score is None and sparse is None),
        query_route=query_route,
    )


def _check_architecture(file: Path, overrides: dict[str, Any], *, native: bool) -> None:
    """Refuse an architecture that is not supported before any other file is read. Modules may have a
    config.json of their own, so there may be none here."""
    config = optional_json(file) | overrides
    if (config.get("architectures") or config.get("model_type")) and not names_static(config):
        read_architecture(file, config, native=native)


def _static_spec(layout: Layout, name: str, overrides: dict[str, Any], pooler: PoolerConfig) -> ModelSpec:
    """The description of a folder with static embeddings, which may have no config.json."""
    static = read_static(layout)
    config = optional_json(layout.folder / "config.json") | overrides
    files = read_files(layout, config, overrides)
    pooling = static_pooling(files, pooler, normalize=not layout.modules and normalizes(files))
    length = static_length(files)
    return ModelSpec(
        folder=str(layout.folder),
        root=str(layout.root),
        name=name,
        architecture=STATIC_ARCHITECTURE,
        config=config,
        overrides=overrides,
        max_model_len=length,
        max_positions=MAX_STATIC_TOKENS,
        hidden_size=static.dim,
        num_layers=0,
        embed_dim=check_widths(files, pooling, static.dim),
        token_dim=static.dim,
        vocab_size=static.vocab_size,
        pooling=pooling,
        prompts=_prompts(files),
        default_prompt_name=_text(files, "default_prompt_name"),
        similarity=_text(files, "similarity_fn_name") or "cosine",
        lower_case=False,
        tasks=(Task.EMBED, Task.TOKEN_EMBED, Task.SCORE),
        static=static,
        why_not_generate="static embeddings have no language-model head",
    )


def _num_segments(config: dict[str, Any], family: Family) -> int:
    given = optional_integer(config, "type_vocab_size")
    return family.default_num_segments if given is None else given


def _text(files: CheckpointFiles, key: str) -> str | None:
    """A string of config_sentence_transformers.json."""
    value = files.sentence_transformers.get(key)
    if value is not None and not isinstance(value, str):
        file = files.root / "config_sentence_transformers.json"
        raise ModelLoadError(f"{file} has {key} = {shown(value)}; it has to be a string", param="model")
    return value


def _eos_text(files: CheckpointFiles) -> str:
    file = files.folder / "tokenizer_config.json"
    token = optional_json(file).get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ModelLoadError(f"{file} has no eos_token, which ends each text for this model", param="model")
    return text


def _prompts(files: CheckpointFiles) -> dict[str, str]:
    file = files.root / "config_sentence_transformers.json"
    texts = mapping(files.sentence_transformers, "prompts", file=file)
    return {name: str(text) for name, text in texts.items() if text is not None}


def with_generation(spec: ModelSpec, wanted: bool | None) -> ModelSpec:
    """Add generation where it is wanted, or by default where the model can and is meant for nothing else."""
    if wanted is None:
        wanted = spec.why_not_generate is None and spec.generates_by_default
    if not wanted:
        return spec
    if spec.why_not_generate is not None:
        raise ModelLoadError(
            f"enable_generation cannot be used: {spec.why_not_generate}", param="enable_generation"
        )
    return msgspec.structs.replace(spec, tasks=(*spec.tasks, Task.GENERATE))


def with_max_model_len(spec: ModelSpec, max_model_len: int) -> ModelSpec:
    """The model as it is served, with the limit that `resolve` settled on."""
    return msgspec.structs.replace(spec, max_model_len=max_model_len)


def _run_by_transformers(spec: ModelSpec) -> ModelSpec:
    """The part of a model that transformers runs: the head that it was trained with, or its hidden states
    and what is made of them. It has no KV cache."""
    first = spec.tasks[0]
    if spec.architecture == COLBERT_CLASS:
        raise ModelLoadError(
            f"--model-impl transformers cannot run {spec.architecture}: its projection to token vectors is "
            "stored with the backbone, where transformers does not read it; leave the flag out",
            param="model_impl",
        )
    if spec.reward is not None and spec.reward.steps:
        raise ModelLoadError(
            f"--model-impl transformers does not judge steps; leave out pooling_type STEP for "
            f"{spec.architecture}",
            param="pooler_config",
        )
    plain: dict[str, Any] = {
        "is_causal": False,
        "why_not_generate": "--model-impl transformers does not generate",
    }
    if first in (Task.CLASSIFY, Task.TOKEN_CLASSIFY, Task.SPARSE):
        tasks = tuple(task for task in spec.tasks if task not in (Task.EMBED, Task.TOKEN_EMBED))
        return msgspec.structs.replace(spec, tasks=tasks, **plain)
    hidden = (Task.EMBED, Task.TOKEN_EMBED)
    if first in hidden:
        return msgspec.structs.replace(spec, **plain)
    # Heads that transformers has no class for: token answers, marks, rewards.
    return msgspec.structs.replace(spec, tasks=hidden, score=None, reward=None, **plain)


def _tasks(
    files: CheckpointFiles, architecture: Architecture, sparse: SparseSpec | None, score: ScoreSpec | None
) -> tuple[Task, ...]:
    """The tasks that the weights allow; the one that the checkpoint was trained for comes first.

    Models that read pairs score them; embedders score by comparing vectors.
    """
    if labelled := architecture.family.heads & _LABELLED:
        return tuple(labelled)
    if sparse is not None and sparse.kind == "splade":
        return (Task.SPARSE, Task.EMBED, Task.TOKEN_EMBED)
    if sparse is not None:
        return (Task.EMBED, Task.TOKEN_EMBED, Task.SPARSE, Task.SCORE)
    if score is not None and (score.tokens or score.marks):
        return (Task.SCORE, Task.EMBED, Task.TOKEN_EMBED)
    if architecture.classifies_sequences:
        scores = () if score is None else (Task.SCORE,)
        rewards = (Task.REWARD,) if label_count(files.config) == 1 else ()
        return (Task.CLASSIFY, *scores, *rewards, Task.EMBED, Task.TOKEN_EMBED)
    if architecture.is_reward_model:
        return (Task.REWARD, Task.EMBED, Task.TOKEN_EMBED)
    if architecture.classifies_tokens:
        return (Task.TOKEN_CLASSIFY, Task.EMBED, Task.TOKEN_EMBED)
    return (Task.EMBED, Task.TOKEN_EMBED, Task.SCORE)


def _scoring(tasks: tuple[Task, ...], why_not: str | None) -> tuple[Task, ...]:
    return tasks if why_not is None else tuple(task for task in tasks if task is not Task.SCORE)


def _late_tasks(files: CheckpointFiles) -> tuple[Task, ...]:
    """One vector for the whole text only where a Pooling module says how."""
    pooled = (Task.EMBED,) if files.has_module("Pooling") else ()
    return (Task.TOKEN_EMBED, *pooled, Task.SCORE)
