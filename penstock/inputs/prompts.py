"""The prompt before a text: from the model's prompt table, or given by the caller."""

from __future__ import annotations

import re
import unicodedata

from penstock.checkpoint.frames import TextFrame
from penstock.checkpoint.spec import ModelSpec
from penstock.errors import BadValue, NotPossible, shown

_INSTRUCTION = re.compile(r"(?<=Instruct: )(.*?)(?=\n)", re.DOTALL)
# The retrieval prompts of models with prompts for several tasks: harrier-oss, jina-code-embeddings.
_TASK_QUERIES, _TASK_DOCUMENTS = ("web_search_query", "nl2code_query"), ("nl2code_document",)
_INPUT_TYPES = {
    "query": ("query", "search_query", "retrieval.query", "s2p_query", *_TASK_QUERIES),
    "search_query": ("query", "search_query", "retrieval.query", *_TASK_QUERIES),
    "document": ("document", "passage", "search_document", "retrieval.passage", *_TASK_DOCUMENTS),
    "passage": ("passage", "document", "search_document", "retrieval.passage", *_TASK_DOCUMENTS),
    "search_document": ("document", "passage", "search_document", "retrieval.passage", *_TASK_DOCUMENTS),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
}
_QUERY_NAMES = {"query", *_INPUT_TYPES["query"], *_INPUT_TYPES["search_query"]}


def is_query(name: str | None) -> bool:
    """Whether an input type or prompt name is for queries. All others are for documents."""
    return name in _QUERY_NAMES


def choose_prompt(
    spec: ModelSpec,
    *,
    prompt_name: str | None = None,
    prompt: str | None = None,
    instruction: str | None = None,
    input_type: str | None = None,
) -> str:
    """The prompt to put before each input. At most one of the four may be given."""
    given = {
        "prompt_name": prompt_name,
        "prompt": prompt,
        "instruction": instruction,
        "input_type": input_type,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise BadValue(f"{' and '.join(named)} exclude each other; give one", param=named[1])
    if prompt is None:
        prompt = _own_prompt(spec, prompt_name, instruction, input_type)
    return framed(spec.frame, prompt)


def framed(frame: TextFrame, prompt: str) -> str:
    """The text before an input: the prompt in the model's frame, or only the frame without a prompt."""
    if frame.prompted is None:
        return prompt
    if frame.ends_sentences:
        prompt = prompt.strip()
        if prompt and not unicodedata.category(prompt[-1]).startswith("P"):
            prompt += "."
    if not prompt:
        return frame.begin
    return frame.prompted.replace("{prompt}", prompt)


def _own_prompt(
    spec: ModelSpec, prompt_name: str | None, instruction: str | None, input_type: str | None
) -> str:
    """The prompt selected by the option that is set; without one, the model's default prompt, if any."""
    if prompt_name is not None:
        return _by_name(spec, prompt_name)
    if instruction is not None:
        return _by_instruction(spec, instruction)
    if input_type is not None:
        return _by_input_type(spec, input_type)
    return spec.prompts.get(spec.default_prompt_name or "", "")


def _by_name(spec: ModelSpec, name: str) -> str:
    if name not in spec.prompts:
        known = f"it has: {', '.join(sorted(spec.prompts))}" if spec.prompts else "it has none"
        raise BadValue(f"model {spec.name} has no prompt named {shown(name)}; {known}", param="prompt_name")
    return spec.prompts[name]


def _by_instruction(spec: ModelSpec, instruction: str) -> str:
    if spec.frame.prompted is not None:
        return instruction
    if spec.instruction_template is not None:
        return spec.instruction_template.replace("{instruction}", instruction)
    for template in spec.prompts.values():
        if _INSTRUCTION.search(template):
            return _INSTRUCTION.sub(lambda _: instruction, template, count=1)
    raise NotPossible(
        f"model {spec.name} has no instruction template in its prompts; use prompt for free text",
        param="instruction",
    )


def _by_input_type(spec: ModelSpec, input_type: str) -> str:
    """The prompt for an input type; empty if the model has none for it."""
    if input_type not in _INPUT_TYPES:
        raise BadValue(
            f"input_type {shown(input_type)} is unknown; use one of {', '.join(_INPUT_TYPES)}",
            param="input_type",
        )
    for name in _INPUT_TYPES[input_type]:
        if name in spec.prompts:
            return spec.prompts[name]
    return ""


def has_prompt_for(spec: ModelSpec, input_type: str) -> bool:
    """Whether the model treats this input type differently from other texts.

    A model with a prompt only for queries has an empty prompt for documents, and vice versa.
    """
    kinds = ("query", "document") if input_type in ("query", "document") else (input_type,)
    names = {name for kind in kinds for name in _INPUT_TYPES.get(kind, ())}
    tells_queries = spec.late is not None or spec.query_end != ""
    return not names.isdisjoint(spec.prompts) or (tells_queries and len(kinds) > 1)


def choose_adapter(
    spec: ModelSpec, adapter: str | None, prompt_name: str | None, input_type: str | None
) -> int:
    """The index of the named adapter, or of the adapter for this prompt name or input type; -1: none."""
    if adapter is not None:
        if not spec.adapters:
            raise NotPossible(f"model {spec.name} has no adapters", param="adapter")
        if adapter not in spec.adapters:
            raise BadValue(
                f"adapter {shown(adapter)} is unknown; model {spec.name} has: {', '.join(spec.adapters)}",
                param="adapter",
            )
        return spec.adapters.index(adapter)
    if not spec.adapters:
        return -1
    names = [prompt_name] if prompt_name is not None else list(_INPUT_TYPES.get(input_type or "", ()))
    if input_type is not None and input_type not in ("classification", "clustering"):
        names.append("retrieval")  # one adapter for queries and documents
    found = next((spec.adapters.index(name) for name in names if name in spec.adapters), -1)
    if found < 0 and spec.requires_adapter:
        raise BadValue(
            f"model {spec.name} needs an adapter for each request; set adapter to one of "
            f"{', '.join(spec.adapters)}, or merge one with "
            f'--hf-overrides \'{{"lora_task": "{spec.adapters[0]}"}}\'',
            param="adapter",
        )
    return found
