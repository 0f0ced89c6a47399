// Rankings through /rerank, and for late interaction which tokens of a document answer which of the query.

import { Refused, ask } from "./client.js";
import { heat, heatFloor, timing } from "./charts.js";
import { dot } from "./embed.js";
import { card, el, fixed, nonEmptyLines, plural, scrolling } from "./dom.js";
import { inputNode, sampleImages } from "./images.js";
import { groups, looksSpecial } from "./readable.js";

const MAX_COLUMNS = 160;  // tokens of a document that the map shows
const TOLERANCE = 1e-3;  // of a score, relative: the same numbers added up in another order
const QUERY = "How does a power station use water?";
const DOCUMENTS = `Falling water turns the turbine, and the turbine makes electricity.
A penstock carries water from the dam down to the power station.
Water boils at a lower temperature on a mountain.
Reset your password from the account settings page.
The night train to Vienna leaves at ten past eleven.
Refunds reach your bank within five working days.
An adult octopus has three hearts and blue blood.`;

const PICTURE_QUERY = "a red circle";
const CAPTIONS = `a picture of a red circle
a recipe for bread`;

const KINDS = {
  bi: { heading: "Search", action: "Search", by: "similarity of the vectors", about: "Query and documents become one vector each; the nearest document comes first." },
  cross: { heading: "Rerank", action: "Rank", by: "score of query and document, read together", about: "The model reads the query with each document and says how well it answers." },
  list: { heading: "Rerank", action: "Rank", by: "score of each document within the list", about: "The model reads the query and all documents at once." },
  late: { heading: "Rerank by tokens", action: "Rank", by: "MaxSim", about: "Every token has a vector. A document scores by how well its tokens answer those of the query." },
};

/** The share of a bar: of 1 where scores are at most 1, otherwise between the lowest and the highest. */
function share(score, scores) {
  const most = Math.max(...scores), least = Math.min(...scores);
  if (least >= -1 && most <= 1) return Math.max(0, score);
  return most === least ? 1 : 0.04 + (0.96 * (score - least)) / (most - least);
}

function ranking(rows, documents, onChoose) {
  const scores = rows.map((row) => row.relevance_score);
  return el("ol", { class: "ranked" }, rows.map(({ index, relevance_score: score }) => {
    const shown = inputNode(documents[index]);
    const text = onChoose ? el("button", { type: "button", class: "link", "data-index": index }, shown) : el("span", {}, shown);
    if (onChoose) text.addEventListener("click", () => onChoose(index));
    return el("li", {}, text, el("data", { value: score }, fixed(score, 3)),
      el("i", { "aria-hidden": "true", style: { width: `${(Math.max(0, share(score, scores)) * 100).toFixed(1)}%` } }));
  }));
}

// ── The map of late interaction ──────────────────────────────────────────────────────────────────

/** A row as the model reads it: marked, cut to its length keeping its last tokens, queries padded; with what is compared. */
export function lateRow(ids, strings, late, isQuery) {
  const marker = isQuery ? late.query_marker_id : late.document_marker_id;
  const room = (isQuery ? late.query_length : late.document_length) - (marker === null ? 0 : 1);
  let tokens = ids.map((id, i) => ({ id, string: strings[i] }));
  if (tokens.length > room) {
    const last = Math.min(late.num_last_tokens, room);
    tokens = [...tokens.slice(0, room - last), ...tokens.slice(tokens.length - last)];
  }
  if (marker !== null) tokens.splice(Math.min(1, tokens.length), 0, { id: marker, string: null, role: isQuery ? "[Q]" : "[D]" });
  while (isQuery && tokens.length < late.expand_to) tokens.push({ id: late.expansion_id, string: null, role: "[MASK]" });
  const skips = !isQuery || late.skips_in_queries;
  return tokens.filter(({ id }) => !(skips && late.skipped_ids.includes(id)));
}

/** A label for each token, of parts of characters the character that they are part of. */
function tokenLabels(row, style) {
  const labels = row.map(({ role }) => role ?? "");
  const named = row.map((token, at) => ({ ...token, at })).filter(({ role }) => !role);
  for (const group of groups(named.map(({ string }) => string), style)) {
    for (const index of group.tokens) labels[named[index].at] = (group.joins ? "·" : "") + (group.text.trim() || "␣");
  }
  return labels;
}

async function tokensOf(text, model, signal) {
  const { answer } = await ask("/tokenize", { model: model.id, prompt: text, return_token_strs: true }, signal);
  return answer;
}

async function tokenVectors(text, type, model, signal) {
  const body = { model: model.id, task: "token_embed", input: [text] };
  if (type === "query") body.input_type = "query";
  const { answer } = await ask("/pooling", body, signal);
  return answer.data[0].data;
}

async function lateSide(text, isQuery, model, signal) {
  const { late } = model, prompt = isQuery ? late.query_prompt : late.document_prompt;
  const [tokens, vectors] = await Promise.all([
    tokensOf(`${prompt}${text}`.trim(), model, signal), tokenVectors(text, isQuery ? "query" : "document", model, signal)]);
  const row = lateRow(tokens.tokens, tokens.token_strs, late, isQuery);
  if (row.length !== vectors.length) return { labels: vectors.map((_, i) => String(i + 1)), vectors, row: vectors.map(() => ({})) };
  return { labels: tokenLabels(row, model.token_style), vectors, row };
}

function mapTable(query, document, values) {
  const columns = document.labels.slice(0, MAX_COLUMNS), floor = heatFloor(values);
  const isFaint = ({ role, string }) => role === "[MASK]" || looksSpecial(role ?? string);
  const head = el("tr", {}, el("td", { class: "corner" }),
    columns.map((label, j) => el("th", { scope: "col", class: isFaint(document.row[j]) ? "faint" : null }, el("span", {}, label))),
    el("th", { scope: "col", class: "best" }, "best"));
  const rows = values.map((row, i) => {
    const best = Math.max(...row), at = row.indexOf(best);
    const cells = row.slice(0, MAX_COLUMNS).map((value, j) => el("td", { class: j === at ? "top" : null, style: heat(value, floor, 1),
      title: `${query.labels[i]} × ${document.labels[j]}: ${fixed(value, 3)}` }));
    return el("tr", { class: isFaint(query.row[i]) ? "faint" : null },
      el("th", { scope: "row" }, query.labels[i]), cells, el("td", { class: "best" }, fixed(best, 2)));
  });
  return el("table", { class: "map" }, el("thead", {}, head), el("tbody", {}, rows));
}

async function tokenMap(query, document, score, model, signal) {
  if (typeof document !== "string") return card("Image", `score ${fixed(score, 3)}`, el("p", { class: "picture" }, inputNode(document)));
  const [asked, found] = await Promise.all([lateSide(query, true, model, signal), lateSide(document, false, model, signal)]);
  const values = asked.vectors.map((a) => found.vectors.map((b) => dot(a, b)));
  const sum = values.reduce((total, row) => total + Math.max(...row), 0);
  const agrees = Math.abs(sum - score) <= TOLERANCE * Math.max(1, Math.abs(score));
  const words = agrees ? `The best values add up to ${fixed(sum, 3)}, the score of /rerank.`
    : `The best values add up to ${fixed(sum, 3)}, but /rerank gave ${fixed(score, 3)}.`;
  const cut = found.labels.length > MAX_COLUMNS ? ` The first ${MAX_COLUMNS} of ${found.labels.length} tokens are shown.` : "";
  return card("Token by token", "query down, document across; framed: the best of each row",
    el("p", { class: "quote" }, document), scrolling("Similarity of each token of the query and of the document", mapTable(asked, found, values)),
    el("p", { class: agrees ? "aside check-sum" : "error check-sum", "data-sum": sum, "data-score": score }, words + cut));
}

/** The ranking, and the map of one document below it; a click on another document shows its map. */
async function lateNodes(result, { request, model, signal }) {
  const { query, documents } = request.body, { results } = result.answer;
  const place = el("div", { "aria-live": "polite" });
  let chosen = 0;
  const list = ranking(results, documents, choose);
  async function choose(index) {
    const mine = ++chosen, row = results.find((each) => each.index === index);
    for (const button of list.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.index === String(index)));
    const map = await tokenMap(query, documents[index], row.relevance_score, model, signal).catch((error) => {
      if (error.name === "AbortError") throw error;
      return el("p", { class: "error", role: "alert" }, error.message);
    });
    if (mine === chosen) place.replaceChildren(map);
  }
  await choose(results[0].index);
  return [list, place];
}

export const rank = {
  id: "rank", title: "Rank",
  titleFor: (model) => (model.score_kind === "bi" ? "Search" : "Rerank"),
  wordsFor: (model) => KINDS[model.score_kind],
  empty: "Press the button to see the documents, the best first.",
  offered: (model) => Boolean(model.score_kind),
  fields: ({ reads_images: images }) => [
    { name: "query", label: "Query", kind: "line", value: images ? PICTURE_QUERY : QUERY },
    { name: "documents", label: "Documents", hint: "one per line", kind: "lines", value: images ? CAPTIONS : DOCUMENTS, rows: images ? 5 : 11 },
    ...(images ? [{ name: "images", label: "Images among the documents", hint: "choose or drop files", kind: "images", param: "images", value: sampleImages() }] : []),
    { name: "instruction", label: "Instruction", kind: "line", option: true, wide: true, placeholder: "the model's own, where it takes one" },
    { name: "top_n", label: "Show the best", kind: "number", min: 1, step: 1, option: true, placeholder: "all" },
    { name: "truncate", label: "Texts that are too long", kind: "select", option: true, param: "truncate_prompt_tokens",
      options: [["refuse", "are refused"], ["limit", "are cut"]] },
  ],
  request(values, model) {
    const query = values.query.trim();
    const documents = [...nonEmptyLines(values.documents), ...(values.images ?? []).map(({ url }) => ({ image: url }))];
    if (!query) throw new Refused("Give a query.", { param: "query" });
    if (!documents.length) throw new Refused("Give at least one document.", { param: "documents" });
    const body = { model: model.id, query, documents };
    if (values.instruction) body.instruction = values.instruction;
    if (values.top_n !== undefined) body.top_n = values.top_n;
    if (values.truncate === "limit") body.truncate_prompt_tokens = -1;
    return { path: "/rerank", body };
  },
  async run(context) {
    const { request, model, signal } = context;
    const result = await ask(request.path, request.body, signal);
    const { results, usage } = result.answer;
    const [list, ...more] = model.score_kind === "late" ? await lateNodes(result, context) : [ranking(results, request.body.documents)];
    return {
      nodes: [timing(result, plural(usage?.total_tokens ?? 0, "token")), card("Best first", KINDS[model.score_kind].by, list), ...more],
      said: `best ${fixed(results[0].relevance_score, 3)}`,
    };
  },
};
