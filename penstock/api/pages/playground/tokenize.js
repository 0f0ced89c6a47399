// The tokens of a text, readable: no marks of the vocabulary, no broken characters.

import { ask } from "./client.js";
import { card, el, plural } from "./dom.js";
import { groups, looksSpecial, visible } from "./readable.js";

const MAX_CHIPS = 1500;
const TEXT = "Hydroelectricity: ein Druckrohr führt das Wasser zur Turbine – 水力発電 🙂";

/** Which of the ids are special tokens: those that decode to nothing when special ones are skipped. */
async function specialIds(tokens, strings, model, signal) {
  const candidates = [...new Set(tokens.filter((_, i) => looksSpecial(strings[i])))];
  if (!candidates.length) return new Set();
  const body = { model: model.id, tokens: candidates.map((id) => [id]), skip_special_tokens: true };
  const { answer } = await ask("/detokenize", body, signal);
  return new Set(candidates.filter((_, i) => answer.data[i].prompt === ""));
}

function chip(group, tokens, special) {
  const isSpecial = special.has(tokens[group.tokens[0]]) && group.tokens.length === 1;
  const ids = group.tokens.map((index, at) => el("small", {}, String(tokens[index]), group.bytes ? el("em", {}, group.bytes[at]) : null));
  const kind = isSpecial ? "special" : group.bytes ? "split" : group.joins ? "joins" : null;
  const title = group.bytes ? `one character of ${group.tokens.length} tokens` : isSpecial ? "special token" : null;
  return el("span", { class: `chip ${kind ?? ""}`.trim(), title }, el("span", { class: "token" }, isSpecial ? group.text : visible(group.text)),
    el("span", { class: "ids" }, ids));
}

export const tokenize = {
  id: "tokens", title: "Tokens", action: "Tokenise", heading: "Tokens", asYouType: true, needsEngine: false,
  about: "What the model reads: the pieces of a text, each with its id.",
  empty: "Press Tokenise to see the tokens of the text.",
  offered: () => true,
  fields: () => [
    { name: "prompt", label: "Text", kind: "text", rows: 5, value: TEXT },
    { name: "special", label: "add the model's special tokens", kind: "check", value: true, param: "add_special_tokens" },
  ],
  request: (values, model) => ({ path: "/tokenize",
    body: { model: model.id, prompt: values.prompt, add_special_tokens: values.special, return_token_strs: true } }),
  async run({ request, model, signal }) {
    const { answer } = await ask(request.path, request.body, signal);
    const { count, max_model_len: limit, tokens, token_strs: strings = [] } = answer;
    const shown = tokens.slice(0, MAX_CHIPS), special = await specialIds(shown, strings, model, signal);
    const chips = groups(strings.slice(0, MAX_CHIPS), model.token_style).map((group) => chip(group, tokens, special));
    if (count > MAX_CHIPS) chips.push(el("span", { class: "aside" }, `and ${plural(count - MAX_CHIPS, "token")} more`));
    const isOver = limit && count > limit, characters = Array.from(request.body.prompt).length;
    const room = isOver ? `${plural(count - limit, "token")} too many for this model` : `of ${plural(limit, "token")} that fit · ${plural(characters, "character")}`;
    const meter = el("div", { class: "phases", "aria-hidden": "true" }, el("i", { style: {
      "flex-basis": `${Math.min(100, (100 * count) / limit)}%`, background: `var(${isOver ? "--bad" : "--device"})` } }));
    return { nodes: [card(plural(count, "token"), room, meter, el("div", { class: "chips" }, chips))], said: plural(count, "token") };
  },
};
