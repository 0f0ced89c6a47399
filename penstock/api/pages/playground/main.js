// Starts the page: asks the server for its models, and shows a tab for each thing that the chosen one can do.

import { Refused, ask, hasKey, setKey } from "./client.js";
import { classify, reward, zeroShot } from "./classify.js";
import { $, el, plural } from "./dom.js";
import { embed, sparse } from "./embed.js";
import { entities } from "./entities.js";
import { chat, complete } from "./generate.js";
import { LivePanel, live } from "./live.js";
import { Panel, showError } from "./panel.js";
import { rank } from "./rank.js";
import { tokenize } from "./tokenize.js";

const READY_MS = 10000, NOT_READY_MS = 2500;
const TASKS = [embed, rank, sparse, classify, zeroShot, entities, reward, chat, complete];
const ALWAYS = [tokenize, live];

let models = [];  // each once, however many names it has
let compared = new Set();  // ids of further models on screen
let panels = new Map();  // view id → panel
let afterKey = null;  // what to do again once a key is given

const chosen = () => models.find((model) => model.id === $("model").value) ?? models[0];

/** The models of a run, the chosen one first. */
function columns() {
  return [chosen(), ...models.filter((model) => compared.has(model.id) && model !== chosen())];
}

/** What the model is meant for. An embedding that nothing vouches for is offered only if there is nothing else. */
function viewsOf(model) {
  const possible = TASKS.filter((view) => view.offered(model));
  const meant = possible.filter((view) => view.isMeantFor?.(model) ?? true);
  return [...(meant.length ? meant : possible), ...ALWAYS];
}

// ── Models ───────────────────────────────────────────────────────────────────────────────────────

async function loadModels() {
  let answer;
  try {
    ({ answer } = await ask("/v1/models"));
  } catch (error) {
    if (error.status === 401) needKey(null, hasKey() ? error : null);
    else showNothing(error.message);
    return false;
  }
  const seen = new Set();
  models = answer.data.filter(({ root }) => !seen.has(root) && seen.add(root));
  compared = new Set([...compared].filter((id) => models.some((model) => model.id === id)));
  const before = $("model").value;
  $("model").replaceChildren(...models.map(({ id }) => el("option", { value: id }, id)));
  if (models.some(({ id }) => id === before)) $("model").value = before;
  $("model").hidden = $("compare-toggle").hidden = models.length < 2;
  $("model-name").hidden = models.length > 1;
  if (!models.length) showNothing("This server holds no model.");
  else showModel();
  return true;
}

function showNothing(words) {
  $("model-name").textContent = "";
  $("panels").replaceChildren(el("p", { class: "card empty" }, words));
}

const SCORES = { cross: "reranker", list: "listwise reranker", late: "late interaction" };
function factsOf({ dimensions, max_model_len: limit, is_embedder: embeds, labels, score_kind: kind, tasks }) {
  return [embeds && plural(dimensions, "dimension"), SCORES[kind], !kind && labels.length > 1 && plural(labels.length, "label"),
    tasks.includes("generate") && "generates text", `${plural(limit, "token")} at most`].filter(Boolean);
}

function showModel() {
  const model = chosen();
  $("model-name").textContent = model.id;
  $("model-facts").replaceChildren(...factsOf(model).map((fact) => el("li", {}, fact)));
  showComparison();
  for (const panel of panels.values()) { panel.abort?.(); panel.show?.(false); }
  panels = new Map();
  for (const view of viewsOf(model)) {
    panels.set(view.id, view === live ? new LivePanel(view) : new Panel(view, model, { columns, needKey }));
  }
  $("tabs").replaceChildren(...[...panels.values()].map(({ view }) => tabOf(view, model)));
  $("panels").replaceChildren(...[...panels.values()].map(({ node }) => node));
  choose(location.hash.slice(1), false);
}

function showComparison() {
  const others = models.filter((model) => model !== chosen());
  $("compare").replaceChildren(el("legend", {}, "Beside it, show"), ...others.map(({ id }) => {
    const box = el("input", { type: "checkbox", value: id });
    box.checked = compared.has(id);
    box.addEventListener("change", () => {
      if (box.checked) compared.add(id); else compared.delete(id);
      for (const panel of panels.values()) { panel.abort?.(); panel.clear?.(); }
    });
    return el("label", {}, box, id);
  }));
}
$("model").addEventListener("change", showModel);
$("compare-toggle").addEventListener("click", () => {
  const open = $("compare").hidden;
  $("compare").hidden = !open;
  $("compare-toggle").setAttribute("aria-expanded", String(open));
  if (!open) { compared.clear(); showComparison(); for (const panel of panels.values()) panel.clear?.(); }
});

// ── Tabs ─────────────────────────────────────────────────────────────────────────────────────────

function tabOf(view, model) {
  const tab = el("button", { type: "button", role: "tab", id: `tab-${view.id}`, "aria-controls": view.id }, view.titleFor?.(model) ?? view.title);
  tab.addEventListener("click", () => choose(view.id, true));
  tab.addEventListener("keydown", (event) => {
    const ids = [...panels.keys()], at = ids.indexOf(view.id);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: ids.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    choose(ids[(next + ids.length) % ids.length], true);
  });
  return tab;
}

function choose(wanted, byUser) {
  const id = panels.has(wanted) ? wanted : panels.keys().next().value;
  for (const [name, panel] of panels) {
    const tab = $(`tab-${name}`), isChosen = name === id;
    tab.setAttribute("aria-selected", String(isChosen));
    tab.tabIndex = isChosen ? 0 : -1;
    panel.node.hidden = !isChosen;
    panel.show?.(isChosen);
  }
  if (!byUser) return;
  $(`tab-${id}`).focus();
  history.replaceState(null, "", `#${id}`);
}
addEventListener("hashchange", () => choose(location.hash.slice(1), false));

// ── API key ──────────────────────────────────────────────────────────────────────────────────────

function openKeyForm(open) {
  $("key-form").hidden = !open;
  $("key-toggle").setAttribute("aria-expanded", String(open));
  if (open) $("key").focus();
}

/** Asks for a key; `retry` runs once one is accepted. */
function needKey(retry, error = null) {
  afterKey = retry;
  if (!models.length) showNothing("With the key, this page shows what the server's models can do.");
  showError($("key-error"), error ?? new Refused(hasKey() ? "The server did not accept the key." : "This server needs an API key."));
  openKeyForm(true);
}
$("key-toggle").addEventListener("click", () => openKeyForm($("key-form").hidden));
$("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    setKey($("key").value.trim());
  } catch (error) {
    showError($("key-error"), error);
    return;
  }
  showError($("key-error"), null);
  const retry = afterKey;
  if (models.length) for (const panel of panels.values()) panel.snippets.write();
  else if (!(await loadModels())) return;
  openKeyForm(false);
  afterKey = null;
  retry?.();
});

// ── State of the server ──────────────────────────────────────────────────────────────────────────

let wasReady = true;
async function watch() {
  let isReady = true, words = "ready";
  try {
    await ask("/ready");
  } catch (error) {
    isReady = false;
    words = error.status ? `not ready: ${error.message}` : "not answering";
  }
  if ($("state").textContent !== words) $("state").textContent = words;  // a live region: speak changes only
  $("state").className = isReady ? "ok" : "bad";
  if (isReady && !wasReady) loadModels();
  wasReady = isReady;
  setTimeout(() => {  // not at all while nobody looks
    if (document.hidden) document.addEventListener("visibilitychange", watch, { once: true }); else watch();
  }, isReady ? READY_MS : NOT_READY_MS);
}

loadModels();
watch();
ask("/version").then(({ answer }) => { $("version").textContent = answer.version; }, () => {});
