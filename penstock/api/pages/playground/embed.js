// Embeddings and how alike they are; sparse embeddings as words.

import { Refused } from "./client.js";
import { bars, similarityTable, strip, timing } from "./charts.js";
import { card, el, fixed, nonEmptyLines, plural, scrolling } from "./dom.js";
import { inputName, inputNode, inputsOf, sampleImages } from "./images.js";
import { looksSpecial, readable } from "./readable.js";

const SHOWN = { vectors: 32, matrix: 24, terms: 18 };
const DTYPES = ["float32", "float16", "bfloat16", "int8", "uint8", "binary", "ubinary"];
const BYTES = { float32: 4, float16: 2, bfloat16: 2 };
const TEXTS = `Falling water turns the turbine.
A penstock carries water down to the generator.
The river drives the power station.
A puppy naps on the couch.
The dog is asleep on the sofa.
My refund has still not arrived.
When do I get my money back?`;

const CAPTIONS = `a red circle
a blue square
a green triangle`;

const TRUNCATION = { name: "truncate", label: "Texts that are too long", kind: "select", option: true, param: "truncate_prompt_tokens",
  options: [["refuse", "are refused"], ["limit", "are cut at the model's limit"]] };

/** Fields that every request with texts shares. */
export function textFields(body, values, model) {
  if (values.adapter) body.adapter = values.adapter;
  if (values.truncate === "limit") body.truncate_prompt_tokens = -1;
  return { model: model.id, ...body };
}

export function inputTexts(values, name = "input") {
  const texts = nonEmptyLines(values[name]);
  if (!texts.length) throw new Refused("Give at least one text.", { param: name });
  return texts;
}

function promptFields(model) {
  const names = Object.keys(model.prompts ?? {});
  const named = names.map((name) => [`name:${name}`, `${name}: “${model.prompts[name].trim()}”`]);
  const fallback = model.default_prompt_name ? `the model's default (${model.default_prompt_name})` : "none";
  return [
    { name: "prompt", label: "Prompt before each text", kind: "select", option: true, wide: true, param: "prompt_name",
      options: [["", fallback], ...named, ["text", "other text …"]] },
    { name: "prompt_text", label: "Text of the prompt", kind: "line", option: true, wide: true, param: "prompt",
      when: ({ prompt }) => prompt === "text" },
  ];
}

function adapterField({ adapters = [], requires_adapter: required }) {
  if (!adapters.length) return [];
  const options = adapters.map((name) => [name, name]);
  return [{ name: "adapter", label: "Adapter", kind: "select", option: !required, options: required ? options : [["", "none"], ...options] }];
}

/** Output numbers as directions around zero, so that cosines compare: uint8 is shifted, bits become ±1. */
function direction(values, dtype, dims) {
  if (dtype === "uint8") return values.map((value) => value - 128);
  if (dtype !== "binary" && dtype !== "ubinary") return values;
  const bytes = dtype === "binary" ? values.map((value) => value + 128) : values;
  return bytes.flatMap((byte) => [7, 6, 5, 4, 3, 2, 1, 0].map((place) => ((byte >> place) & 1 ? 1 : -1))).slice(0, dims || undefined);
}
export const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);
const norm = (a) => Math.sqrt(dot(a, a));

function similarity(inputs, vectors) {
  const norms = vectors.map((vector) => norm(vector) || 1);
  const values = vectors.map((a, i) => vectors.map((b, j) => dot(a, b) / (norms[i] * norms[j])));
  let best = null;
  values.forEach((row, i) => row.forEach((value, j) => { if (i < j && !(value <= best?.value)) best = { value, i, j }; }));
  const words = best ? `cosine; closest: ${best.i + 1} and ${best.j + 1}, ${fixed(best.value, 2)}` : "cosine";
  return card("Similarity", words, scrolling("Similarity of the inputs", similarityTable(inputs, values)));
}

function vectorRow(input, index, raw, vector, dtype) {
  const name = inputName(input);
  const numbers = raw.slice(0, 3).map((value) => (Number.isInteger(value) ? value : value.toFixed(3)));
  const facts = `[${numbers.join(", ")}${raw.length > 3 ? ", …" : ""}]  norm ${norm(vector).toFixed(3)}  ${plural(raw.length * (BYTES[dtype] ?? 1), "byte")}`;
  return el("div", { class: "vector" }, el("p", { title: name }, el("span", { class: "number" }, String(index + 1)), inputNode(input)),
    strip(vector, `${vector.length} values of “${name}”: blue above zero, orange below`), el("small", {}, facts));
}

export const embed = {
  id: "embed", title: "Embed", action: "Embed",
  wordsFor: ({ reads_images: images }) => (images
    ? { heading: "Embed texts and images", about: "One vector for each text and each image, in one space. What means the same has vectors that point the same way.", action: "Embed" }
    : { heading: "Embed texts", about: "One vector for each text. Texts that mean the same have vectors that point the same way.", action: "Embed" }),
  empty: "Press Embed to see how alike the texts are, their vectors, and where the time went.",
  offered: (model) => model.tasks.includes("embed"),
  isMeantFor: (model) => model.is_embedder,
  fields: (model) => [
    { name: "input", label: "Texts", hint: "one per line", kind: "lines", value: model.reads_images ? CAPTIONS : TEXTS, rows: model.reads_images ? 5 : 9 },
    ...(model.reads_images ? [{ name: "images", label: "Images", hint: "choose or drop files", kind: "images", param: "images", value: sampleImages() }] : []),
    ...adapterField(model),
    ...promptFields(model),
    { name: "dimensions", label: "Dimensions", kind: "number", min: 1, step: 1, option: true, placeholder: `all ${model.dimensions ?? ""}`.trim() },
    { name: "dtype", label: "Output type", kind: "select", option: true, param: "embed_dtype", options: DTYPES.map((name) => [name, name]) },
    { ...TRUNCATION, wide: true },
  ],
  request(values, model) {
    const images = values.images ?? [];
    const body = { input: inputsOf(images.length ? nonEmptyLines(values.input) : inputTexts(values), images) };
    if (values.dimensions !== undefined) body.dimensions = values.dimensions;
    if (values.dtype !== "float32") body.embed_dtype = values.dtype;
    if (values.prompt.startsWith("name:")) body.prompt_name = values.prompt.slice("name:".length);
    if (values.prompt === "text" && values.prompt_text) body.prompt = values.prompt_text;
    return { path: "/v1/embeddings", body: textFields(body, values, model) };
  },
  show(result, { request, model }) {
    const { input: inputs, embed_dtype: dtype = "float32", dimensions } = request.body;
    const raw = result.answer.data.map((row) => row.embedding);
    const vectors = raw.map((values) => direction(values, dtype, dimensions ?? model.dimensions));
    const few = Math.min(inputs.length, SHOWN.matrix);
    const rows = inputs.slice(0, SHOWN.vectors).map((input, i) => vectorRow(input, i, raw[i], vectors[i], dtype));
    if (inputs.length > rows.length) rows.push(el("p", { class: "aside" }, `and ${plural(inputs.length - rows.length, "vector")} more`));
    return {
      nodes: [timing(result, plural(result.answer.usage?.total_tokens ?? 0, "token")),
        similarity(inputs.slice(0, few), vectors.slice(0, few)),
        card("Vectors", `${plural(vectors[0].length, "dimension")}, ${dtype}; blue above zero, orange below`, ...rows)],
      said: plural(vectors.length, "vector"),
    };
  },
};

const SPARSE_TEXTS = `A penstock carries water down to the turbine.
The dog is asleep on the sofa.`;

function weighed(text, terms, model) {
  const most = terms[0]?.weight || 1;
  const rows = terms.slice(0, SHOWN.terms).map(({ token, weight }) => ({
    name: looksSpecial(token) ? token : readable(token, model.token_style).trim() || "␣", share: weight / most, shown: fixed(weight, 3) }));
  const more = terms.length - rows.length;
  return card(text, plural(terms.length, "word"), el("div", { class: "two" }, bars(rows)),
    more > 0 ? el("p", { class: "aside" }, `and ${more} lighter ones`) : null);
}

export const sparse = {
  id: "sparse", title: "Sparse", action: "Weigh words", heading: "Sparse embedding",
  about: "A weight for each word that the model finds in a text, or thinks of when it reads it.",
  empty: "Press Weigh words to see which words stand for each text, the heaviest first.",
  offered: (model) => model.tasks.includes("sparse"),
  fields: () => [
    { name: "input", label: "Texts", hint: "one per line", kind: "lines", value: SPARSE_TEXTS, rows: 5 },
    { name: "top_k", label: "At most this many words", kind: "number", min: 1, step: 1, option: true, placeholder: "all" },
    { name: "min_weight", label: "Least weight", kind: "number", min: 0, option: true, placeholder: "0" },
    { ...TRUNCATION, wide: true },
  ],
  request(values, model) {
    const body = { input: inputTexts(values) };
    if (values.top_k !== undefined) body.top_k = values.top_k;
    if (values.min_weight !== undefined) body.min_weight = values.min_weight;
    return { path: "/v1/sparse", body: textFields(body, values, model) };
  },
  show(result, { request, model }) {
    const rows = result.answer.data.map(({ sparse: terms }, i) => weighed(request.body.input[i], terms, model));
    return { nodes: [timing(result, plural(result.answer.usage?.total_tokens ?? 0, "token")), ...rows], said: plural(rows.length, "text") };
  },
};
