// Entities, highlighted in the text.

import { Refused } from "./client.js";
import { timing } from "./charts.js";
import { card, commaSeparated, el, percent, plural } from "./dom.js";
import { textFields } from "./embed.js";

const COLOURS = 6;
const TEXT = "Ada Lovelace was born in London in 1815. She worked with Charles Babbage, and later generations at IBM and the University of Cambridge read her notes.";
const AGGREGATIONS = [["simple", "neighbours with the same label"], ["first", "words, by their first token"],
  ["average", "words, by their average"], ["max", "words, by their best token"], ["none", "nothing: every token"]];

/** The text with its entities marked. Offsets count characters as Python does. Of nested ones the outer is marked. */
function highlighted(text, entities, colourOf) {
  const characters = Array.from(text), out = [];
  let at = 0;
  for (const { start, end, label } of [...entities].sort((a, b) => a.start - b.start || b.end - a.end)) {
    if (start < at) continue;
    out.push(characters.slice(at, start).join(""),
      el("mark", { class: `kind-${colourOf(label)}` }, characters.slice(start, end).join(""), el("small", {}, label)));
    at = end;
  }
  out.push(characters.slice(at).join(""));
  return el("p", { class: "entities" }, out);
}

function entityTable(entities) {
  const rows = entities.map(({ text, label, score, start, end }) =>
    el("tr", {}, el("td", {}, text), el("td", {}, label), el("td", { class: "figure" }, percent(score)), el("td", { class: "figure" }, `${start}–${end}`)));
  const head = ["entity", "label", "score", "characters"].map((name) => el("th", { scope: "col" }, name));
  return el("table", { class: "list" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows));
}

export const entities = {
  id: "entities", title: "Entities", action: "Find entities", heading: "Find entities",
  about: "Names, places and other spans of the text that the model labels.",
  empty: "Press Find entities to see them in the text.",
  offered: (model) => model.tasks.includes("token_classify") || model.tasks.includes("entities"),
  fields: (model) => [
    { name: "input", label: "Text", kind: "text", value: TEXT, rows: 6 },
    ...(model.tasks.includes("entities")
      ? [{ name: "labels", label: "Labels", hint: "separated by commas", kind: "line", value: "person, place, organisation" },
        { name: "threshold", label: "Least score", kind: "number", min: 0, max: 1, step: 0.05, option: true, placeholder: "0.5" }]
      : [{ name: "aggregation", label: "Join", kind: "select", option: true, wide: true, options: AGGREGATIONS }]),
    { name: "truncate", label: "A text that is too long", kind: "select", option: true, wide: true, param: "truncate_prompt_tokens",
      options: [["refuse", "is refused"], ["limit", "is cut at the model's limit"]] },
  ],
  request(values, model) {
    if (!values.input.trim()) throw new Refused("Give a text.", { param: "input" });
    const body = { input: [values.input] };
    if (values.labels !== undefined) {
      body.labels = commaSeparated(values.labels);
      if (!body.labels.length) throw new Refused("Give at least one label.", { param: "labels" });
      if (values.threshold !== undefined) body.threshold = values.threshold;
    }
    if (values.aggregation && values.aggregation !== "simple") body.aggregation = values.aggregation;
    return { path: "/v1/entities", body: textFields(body, values, model) };
  },
  show(result, { request }) {
    const found = result.answer.data[0].entities, labels = [...new Set(found.map(({ label }) => label))];
    const counts = labels.map((label) => `${label} ${found.filter((each) => each.label === label).length}`).join(" · ");
    return {
      nodes: [timing(result, plural(result.answer.usage?.total_tokens ?? 0, "token")),
        card(plural(found.length, "span"), counts, highlighted(request.body.input[0], found, (label) => labels.indexOf(label) % COLOURS),
          found.length ? entityTable(found) : null)],
      said: plural(found.length, "span"),
    };
  },
};
