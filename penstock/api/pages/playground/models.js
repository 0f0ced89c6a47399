// The models of the server, each once, with their states: whatever shows a state is kept up to date from here.

import { ask } from "./client.js";
import { el } from "./dom.js";

let models = [];  // of the names of a model, the first
let states = new Map();  // model id → state
let onChange = () => {};

export const allModels = () => models;
/** Those with engines of their own, so without LoRA adapters. */
export const baseModels = () => models.filter(({ parent }) => !parent);
export const stateOf = (id) => states.get(id);
/** Whether a request has to wait until the model is awake. */
export const hasToWake = (id) => ["falling asleep", "asleep", "waking"].includes(stateOf(id));
/** Calls `listener` when there are other models than before. */
export const whenModelsChange = (listener) => { onChange = listener; };

/** What a model is, apart from its state and from when a process of the server began to serve it. */
export const describe = ({ state, created, ...facts }) => JSON.stringify(facts);
const describeAll = (found) => found.map(describe).join();

/** Asks the server for its models and shows their states. */
export async function readModels() {
  const { answer } = await ask("/v1/models");
  // A LoRA adapter has a parent, and is shown like a model; its root is a path that others may share.
  const seen = new Set(), found = answer.data.filter(({ root, parent }) => parent || (!seen.has(root) && seen.add(root)));
  states = new Map(found.map(({ id, state }) => [id, state]));
  if (describeAll(found) !== describeAll(models)) {
    models = found;
    onChange();
  }
  showStates();
}

/** The state of a model; `readModels` changes it in place. */
export function badge(id) {
  const node = el("span", { class: "badge" });
  setBadge(node, id);
  return node;
}

export function setBadge(node, id) {
  node.dataset.model = id;
  paint(node);
}

function paint(node) {
  const state = stateOf(node.dataset.model) ?? "";
  if (node.textContent === state) return;
  node.textContent = node.dataset.state = state;
}

/** Shows the states that are known: on badges, and in the list beside names of models that are not awake. */
export function showStates() {
  for (const node of document.querySelectorAll(".badge")) paint(node);
  for (const option of document.querySelectorAll("#model option")) {
    const id = option.value, isPlain = option.selected || stateOf(id) === "awake";  // the chosen one has a badge
    const text = isPlain ? id : `${id} · ${stateOf(id)}`;
    if (option.textContent !== text) option.textContent = text;
  }
}
