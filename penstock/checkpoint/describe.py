"""Reads a model's files into a `ModelSpec`.

Reads `config.json`, `modules.json` and the files that they point to. Each part of the description has its own
module; this one puts them together. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from penstock.checkpoint import static
from penstock.checkpoint.adapters import adapter_names
from penstock.checkpoint.draft import check_draft
from penstock.checkpoint.dual import read_dual
from penstock.checkpoint.families import Architecture, Family, read_architecture, text_tower
from penstock.checkpoint.files import (
    CHAT_END_MODULE,
    CheckpointFiles,
    mapping,
    optional_integer,
    optional_json,
    shown,
    usable_values,
)
from penstock.checkpoint.find import find, served_name
from penstock.checkpoint.frames import TextFrame, message_frame, published_frame
from penstock.checkpoint.gemma_vision import read_gemma_vision
from penstock.checkpoint.generation import eos_token_ids, why_not_generate
from penstock.checkpoint.gliclass import encoder_config, read_zero_shot
from penstock.checkpoint.gliner import is_gliner, read_entities, read_model_config
from penstock.checkpoint.identity import Identity, read_identity
from penstock.checkpoint.image_processor import ImageProcessorSpec
from penstock.checkpoint.image_prompts import read_image_prompt, with_published_pixels
from penstock.checkpoint.keys import check_keys
from penstock.checkpoint.labels import label_names
from penstock.checkpoint.late import COLBERT_DIM
from penstock.checkpoint.layout import FolderLayout, read_files, read_layout
from penstock.checkpoint.limits import any_max_positions, max_model_len, max_positions
from penstock.checkpoint.merged import check_merged, holds_adapter_alone, with_base_model
from penstock.checkpoint.pages import is_page_retriever, page_prompts, page_query_end
from penstock.checkpoint.parts import Checkpoint, Parts, check_combinations, read_parts, read_tasks
from penstock.checkpoint.pooling import check_widths, static_pooling
from penstock.checkpoint.quantization import stored_format, with_quantization
from penstock.checkpoint.qwen_vision import check_qwen_vision
from penstock.checkpoint.reward import read_reward
from penstock.checkpoint.sizes import check_any_sizes, read_sizes
from penstock.checkpoint.sparse import multi_vector_file
from penstock.checkpoint.spec import ModelSpec, with_default_prompt, with_generation
from penstock.checkpoint.tokenizer_settings import bos_text, eos_text
from penstock.checkpoint.transformers_impl import run_by_transformers
from penstock.checkpoint.unsupported import why_no_config
from penstock.checkpoint.vision_tower import check_vision, image_processor
from penstock.config import EngineConfig, PoolerConfig
from penstock.errors import ModelLoadError
from penstock.speculative_config import read_speculative_config
from penstock.types import LABELLED_TASKS, Task


@dataclass(frozen=True, slots=True)
class _Options:
    """The caller's options for a model."""

    name: str
    overrides: dict[str, Any]
    pooler: PoolerConfig
    score_template: str | None
    is_native: bool  # not run by transformers, so the architecture needs a family record


def describe(config: EngineConfig) -> ModelSpec:
    """Find the model and read everything that its files say."""
    folder = find(config.model, config.revision, config.download_dir)
    is_adapter = holds_adapter_alone(folder)
    if is_adapter:
        folder = with_base_model(folder, config)
    elif config.base_model is not None:
        raise ModelLoadError(
            f"{folder} is a complete model; --base-model is for repositories that hold only an adapter",
            param="base_model",
        )
    native = config.model_impl != "transformers"
    with usable_values(folder):
        spec = read_spec(
            folder,
            next(iter(config.model_names), None) or served_name(config.model),
            config.hf_overrides,
            config.pooler_config,
            config.score_template,
            native=native,
        )
    spec = with_default_prompt(spec, config.default_prompt_name, config.default_prompt)
    spec = with_generation(spec, config.enable_generation) if native else run_by_transformers(spec)
    if is_adapter:
        check_merged(folder, spec.config)
        spec = msgspec.structs.replace(spec, merges_adapter=True)
    return _with_draft(_with_default_task(spec, config.pooler_config.task), config)


def _with_draft(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """Add the draft model, if the configuration has one.

    `resolve` refuses a draft model for a model that does not generate.
    """
    settings = read_speculative_config(config.speculative_config)
    if settings is None or settings.model is None or not spec.generates:
        return spec
    try:
        draft = describe(
            EngineConfig(model=settings.model, revision=settings.revision, download_dir=config.download_dir)
        )
    except ModelLoadError as error:
        raise ModelLoadError(f"speculative_config: {error.message}", param="speculative_config") from error
    check_draft(spec, draft)
    return msgspec.structs.replace(spec, draft=draft if draft.generates else with_generation(draft, True))


def _with_default_task(spec: ModelSpec, name: str | None) -> ModelSpec:
    if name is None:
        return spec
    known = (*spec.tasks, Task.TOKEN_CLASSIFY) if spec.classifies_each_token else spec.tasks
    if name not in known:
        raise ModelLoadError(
            f"the pooler config names task {name!r}, but {spec.name} has: {', '.join(known)}",
            param="pooler_config",
        )
    return msgspec.structs.replace(spec, default_task=Task(name))


def read_spec(
    folder: Path,
    name: str,
    overrides: dict[str, Any] | None = None,
    pooler: PoolerConfig | None = None,
    score_template: str | None = None,
    *,
    native: bool = True,
) -> ModelSpec:
    """Read a model folder. If `native`, an architecture without a family record is refused first."""
    options = _Options(name, overrides or {}, pooler or PoolerConfig(), score_template, native)
    _check_architecture(folder / "config.json", options)
    layout = read_layout(folder)
    if static.is_static(layout):
        return _static_spec(layout, options)
    checkpoint = _read_checkpoint(layout, options)
    parts = read_parts(checkpoint, name, options.pooler, score_template)
    check_combinations(checkpoint, parts)
    return _model_spec(checkpoint, parts, options)


def _check_architecture(file: Path, options: _Options) -> None:
    """Refuse an unsupported architecture before any other file is read.

    The root may have no config.json, because modules can have their own.
    """
    config = optional_json(file) | options.overrides
    if (config.get("architectures") or config.get("model_type")) and not static.names_static(config):
        read_architecture(file, config, native=options.is_native)


def _read_checkpoint(layout: FolderLayout, options: _Options) -> Checkpoint:
    """Read config.json and the files that extend it; refuse sizes and formats that are not supported."""
    root, config_file, native = layout.root, layout.folder / "config.json", options.is_native
    if not config_file.is_file() and not is_gliner(root):
        raise ModelLoadError(f"{root} is not a model folder: {why_no_config(root)}", param="model")
    config = read_model_config(layout.folder) | options.overrides
    architecture = read_architecture(config_file, config, native=native)
    if native:
        config = with_quantization(layout.folder, text_tower(architecture, config_file, config))
    if Task.ZERO_SHOT in architecture.family.heads:
        config = encoder_config(config_file, config)
    files = read_files(layout, config, options.overrides)
    if native:
        read_sizes(config_file, architecture.family, config)
        check_keys(config_file, architecture.family, config)
        check_qwen_vision(architecture.family, config)
        if architecture.family.is_dual or architecture.family.has_siglip:
            check_vision(config_file, architecture, config)
        stored_format(config)
    else:
        check_any_sizes(config_file, architecture, config)
    return Checkpoint(files, architecture, layout.query_route)


def _model_spec(checkpoint: Checkpoint, parts: Parts, options: _Options) -> ModelSpec:
    files, architecture, family = checkpoint.files, checkpoint.architecture, checkpoint.family
    config, late, width = files.config, parts.late, parts.width
    positions = _max_positions(checkpoint, options)
    adapters = adapter_names(config, family.adapters_key)
    identity = _identity(checkpoint, options.name)
    frame = _text_frame(checkpoint, identity)
    images = _image_processor(checkpoint, identity)
    return ModelSpec(
        folder=str(files.folder),
        root=str(files.root),
        name=options.name,
        architecture=architecture.name,
        config=config | ({COLBERT_DIM: late.dim} if late is not None and _has_own_dim(architecture) else {}),
        overrides=options.overrides,
        max_model_len=max_model_len(files, positions, family.trained_row_length),
        max_positions=positions,
        hidden_size=parts.hidden_size,
        num_layers=optional_integer(config, *family.keys.num_layers),
        embed_dim=check_widths(files, parts.pooling, width * len(parts.pooling.methods)),
        token_dim=_token_dim(checkpoint, width) if late is None else late.dim,
        vocab_size=files.integer("vocab_size"),
        num_segments=_num_segments(config, family),
        pooling=parts.pooling,
        prompts=_prompts(files, family) or _family_prompts(files, family, identity),
        default_prompt_name=_text(files, "default_prompt_name") or next(iter(family.prompts), None),
        similarity=_text(files, "similarity_fn_name") or "cosine",
        lower_case=_lower_cases(files, family),
        tasks=read_tasks(checkpoint, parts),
        why_not_score=parts.why_not_score,
        labels=() if family.heads & LABELLED_TASKS else label_names(architecture, config),
        entities=read_entities(config),
        zero_shot=read_zero_shot(config),
        sparse=parts.sparse,
        multi_vector=multi_vector_file(files.folder) if parts.sparse is not None and late is None else None,
        images=images,
        image_prompt=None if images is None else read_image_prompt(files.folder, config, images, identity),
        dual=read_dual(files.folder, architecture, config) if family.is_dual else None,
        score=parts.score,
        reward=read_reward(files, architecture, options.pooler),
        late=late,
        adapters=adapters,
        requires_adapter=family.requires_adapter and bool(adapters),
        query_adapters=family.query_adapters,
        instruction_template=family.instruction_template,
        frame=frame,
        text_end=eos_text(files.folder) if family.appends_eos else frame.end or _text_end(files),
        query_end=_query_end(checkpoint, parts, identity),
        begin_token=bos_text(files.folder) if family.begins_with_bos else None,
        is_causal=checkpoint.is_causal,
        why_not_sliced=_why_not_sliced(files),
        eos_token_ids=eos_token_ids(files),
        why_not_generate=why_not_generate(files.folder, architecture, config),
        generates_by_default=family.generates_by_default
        or (not files.modules and parts.score is None and parts.sparse is None and frame.prompted is None),
        query_route=checkpoint.query_route,
    )


def _static_spec(layout: FolderLayout, options: _Options) -> ModelSpec:
    """The description of a folder with static embeddings, which may have no config.json."""
    if not options.is_native:
        raise ModelLoadError(
            f"{layout.root} holds static embeddings, which --model-impl transformers cannot run; leave it "
            "out",
            param="model_impl",
        )
    table = static.read_static(layout)
    config = optional_json(layout.folder / "config.json") | options.overrides
    files = read_files(layout, config, options.overrides)
    normalize = not layout.modules and static.normalizes(files)
    pooling = static_pooling(files, options.pooler, normalize=normalize)
    return ModelSpec(
        folder=str(layout.folder),
        root=str(layout.root),
        name=options.name,
        architecture=static.ARCHITECTURE,
        config=config,
        overrides=options.overrides,
        max_model_len=static.static_length(files),
        max_positions=static.MAX_TOKENS,
        hidden_size=table.dim,
        num_layers=0,
        embed_dim=check_widths(files, pooling, table.dim),
        token_dim=table.dim,
        vocab_size=table.vocab_size,
        pooling=pooling,
        prompts=_prompts(files, None),
        default_prompt_name=_text(files, "default_prompt_name"),
        similarity=_text(files, "similarity_fn_name") or "cosine",
        lower_case=False,
        tasks=(Task.EMBED, Task.TOKEN_EMBED, Task.SCORE),
        static=table,
        why_not_generate="static embeddings have no language-model head",
    )


def _has_own_dim(architecture: Architecture) -> bool:
    """Whether the projection of token vectors is among the model's own tensors."""
    return architecture.is_colbert or architecture.family.page_dim is not None


def _image_processor(checkpoint: Checkpoint, identity: Identity) -> ImageProcessorSpec | None:
    files = checkpoint.files
    if checkpoint.family.has_gemma_vision:
        vision = read_gemma_vision(files.folder, files.config)
        return None if vision is None else vision.pixels
    if not checkpoint.family.reads_images:
        return None
    return with_published_pixels(image_processor(files.folder, files.config), identity)


def _identity(checkpoint: Checkpoint, name: str) -> Identity:
    """The checkpoint's names and its class, because some published models have a class of their own."""
    identity = read_identity(checkpoint.files.root, name, checkpoint.files.config)
    return replace(identity, names=(*identity.names, checkpoint.architecture.name.lower()))


def _text_frame(checkpoint: Checkpoint, identity: Identity) -> TextFrame:
    """The prompt template around the texts of a model that also reads images."""
    files = checkpoint.files
    if checkpoint.family.qwen_vision is None or checkpoint.family.page_dim is not None:
        return TextFrame()
    if files.modules:
        return message_frame(files) if files.has_module("Pooling") else TextFrame()
    return published_frame(identity)


def _max_positions(checkpoint: Checkpoint, options: _Options) -> int:
    files, family = checkpoint.files, checkpoint.family
    if options.is_native:
        return max_positions(family, files.config, files.config_file)
    return any_max_positions(files, family)


def _lower_cases(files: CheckpointFiles, family: Family) -> bool:
    """Whether to lower-case texts. SigLIP was trained so, but its published tokenizer.json does not do it."""
    if family.name in ("siglip", "siglip2"):
        return optional_json(files.folder / "tokenizer_config.json").get("do_lower_case") is not False
    return bool(files.transformer.get("do_lower_case", False))


def _num_segments(config: dict[str, Any], family: Family) -> int:
    given = optional_integer(config, "type_vocab_size")
    return family.default_num_segments if given is None else given


def _text_end(files: CheckpointFiles) -> str:
    """The text that zembed's own module code appends to each input. A key of its files may repeat it."""
    if not files.has_module(CHAT_END_MODULE):
        return ""
    end = _text(files, "suffix")
    return "<|im_end|>\n" if end is None else end


def _why_not_sliced(files: CheckpointFiles) -> str | None:
    """Why `dimensions` cannot truncate a vector, if so. zembed's code projects it to each smaller size."""
    if files.has_module(CHAT_END_MODULE):
        return "this model was trained with a projection for each size, which is not supported"
    return None


def _text(files: CheckpointFiles, key: str) -> str | None:
    """A string of config_sentence_transformers.json."""
    value = files.sentence_transformers.get(key)
    if value is not None and not isinstance(value, str):
        file = files.root / "config_sentence_transformers.json"
        raise ModelLoadError(f"{file} has {key} = {shown(value)}; it has to be a string", param="model")
    return value


def _token_dim(checkpoint: Checkpoint, width: int) -> int:
    """The width of token vectors, which some models project separately from the pooled vector."""
    key = checkpoint.family.token_dim_key
    return width if key is None else checkpoint.files.integer(key)


def _family_prompts(files: CheckpointFiles, family: Family, identity: Identity) -> dict[str, str]:
    """The prompts of the model's published code, for models whose files have none."""
    if is_page_retriever(family.name):
        return page_prompts(files, family.name, identity)
    return dict(family.prompts)


def _query_end(checkpoint: Checkpoint, parts: Parts, identity: Identity) -> str:
    """The text after a query, for page retrievers with one vector per page."""
    if parts.late is not None or not is_page_retriever(checkpoint.family.name):
        return ""
    return page_query_end(checkpoint.files, checkpoint.family.name, identity)


def _prompts(files: CheckpointFiles, family: Family | None) -> dict[str, str]:
    """The prompts in the files. Page retrievers list empty ones, because their chat template has the text."""
    file = files.root / "config_sentence_transformers.json"
    texts = mapping(files.sentence_transformers, "prompts", file=file)
    prompts = {name: str(text) for name, text in texts.items() if text is not None}
    in_template = family is not None and is_page_retriever(family.name) and not any(prompts.values())
    return {} if in_template else prompts
