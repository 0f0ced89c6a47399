// Starts the page: asks the server for its models, and shows a tab for each thing that the chosen one can do.

import { Refused, ask, hasKey, setKey } from "./client.js";
import { classify, reward, zeroShot } from "./classify.js";
import { $, el, plural } from "./dom.js";
import { embed, sparse } from "./embed.js";
import { entities } from "./entities.js";
import { chat, complete } from "./generate.js";
import { LivePanel, live } from "./live.js";
import { forgetOperator } from "./model_table.js";
import { allModels, describe, readModels, setBadge, showStates, whenModelsChange } from "./models.js";
import { Panel, showError } from "./panel.js";
import { rank } from "./rank.js";
import { tokenize } from "./tokenize.js";

const READY_MS = 10000, NOT_READY_MS = 2500;
const TASKS = [embed, rank, sparse, classify, zeroShot, entities, reward, chat, complete];
const ALWAYS = [tokenize, live];

let compared = new Set();  // ids of further models on screen
let panels = new Map();  // view id → panel
const drafts = new Map();  // view id → what the user wrote, for the next model that has the view
let described = "";  // the model that they are for
let wanted = "";  // the tab that the user chose last; a model may not have it
let afterKey = null;  // what to do again once a key is given

const chosen = () => allModels().find((model) => model.id === $("model").value) ?? allModels()[0];

/** The models of a run, the chosen one first. */
function columns() {
  return [chosen(), ...allModels().filter((model) => compared.has(model.id) && model !== chosen())];
}

/** What the model is meant for. An embedding that nothing vouches for is offered only if there is nothing else. */
function viewsOf(model) {
  const possible = TASKS.filter((view) => view.offered(model));
  const meant = possible.filter((view) => view.isMeantFor?.(model) ?? true);
  return [...(meant.length ? meant : possible), ...ALWAYS];
}
const titleOf = (view, model) => view.titleFor?.(model) ?? view.title;
const hasView = (model, id) => viewsOf(model).some((view) => view.id === id);

// ── Models ───────────────────────────────────────────────────────────────────────────────────────

async function loadModels() {
  try {
    await readModels();
  } catch (error) {
    if (error.status === 401) needKey(null, hasKey() ? error : null);
    else if (!allModels().length) showNothing(error.message);
    return false;
  }
  if (!allModels().length) showNothing("This server holds no model.");
  return true;
}

/** There are other models than before. What is on screen stays if its model is still the same. */
whenModelsChange(() => {
  const models = allModels(), before = $("model").value;
  compared = new Set([...compared].filter((id) => models.some((model) => model.id === id)));
  $("model").replaceChildren(...models.map(({ id }) => el("option", { value: id }, id)));
  $("model").hidden = $("compare-toggle").hidden = models.length < 2;
  $("model-name").hidden = models.length > 1;
  if (!models.length) return showNothing("This server holds no model.");
  const kept = models.find(({ id }) => id === before) ?? firstModel();
  $("model").value = kept.id;
  if (describe(kept) === described) return showOthers();
  showModel();
  if (readAddress()[1]) writeAddress();
});

/** The model of the address; without one, the first that has the tab of the address. */
function firstModel() {
  const models = allModels(), [view, id] = readAddress();
  return models.find((model) => model.id === id) ?? models.find((model) => hasView(model, view)) ?? models[0];
}

function showNothing(words) {
  $("model-name").textContent = "";
  $("model-state").hidden = $("elsewhere").hidden = true;
  $("model-facts").replaceChildren();
  $("tabs").replaceChildren();
  for (const panel of panels.values()) { panel.abort?.(); panel.show?.(false); }
  panels = new Map();
  described = "";
  $("panels").replaceChildren(el("p", { class: "card empty" }, words));
}

const SCORES = { cross: "reranker", list: "listwise reranker", late: "late interaction" };
function factsOf({ dimensions, max_model_len: limit, is_embedder: embeds, labels, score_kind: kind, tasks, reads_images: images }) {
  return [embeds && plural(dimensions, "dimension"), SCORES[kind], !kind && labels.length > 1 && plural(labels.length, "label"),
    tasks.includes("generate") && "generates text", images && "reads images", `${plural(limit, "token")} at most`].filter(Boolean);
}

function showModel() {
  const model = chosen();
  described = describe(model);
  for (const [id, panel] of panels) if (panel.drafts) drafts.set(id, panel.drafts);
  $("model-name").textContent = model.id;
  $("model-facts").replaceChildren(...factsOf(model).map((fact) => el("li", {}, fact)));
  for (const panel of panels.values()) { panel.abort?.(); panel.show?.(false); }
  panels = new Map();
  for (const view of viewsOf(model)) {
    panels.set(view.id, view === live ? new LivePanel(view) : new Panel(view, model, { columns, needKey }));
    panels.get(view.id).write?.(drafts.get(view.id) ?? []);
  }
  $("tabs").replaceChildren(...[...panels.values()].map(({ view }) => tabOf(view, model)));
  $("panels").replaceChildren(...[...panels.values()].map(({ node }) => node));
  showOthers();
  choose(wanted || readAddress()[0], false);
}

/** What depends on the other models too. */
function showOthers() {
  setBadge($("model-state"), chosen().id);
  $("model-state").hidden = false;
  $("model-state").classList.toggle("alone", allModels().length < 2);
  showComparison();
  showElsewhere();
}

/** What only other models can do: a click chooses the first that can. */
function showElsewhere() {
  const own = viewsOf(chosen()).map((view) => titleOf(view, chosen())), found = new Map();
  for (const model of allModels()) {
    for (const view of viewsOf(model)) {
      const title = titleOf(view, model);
      if (!own.includes(title) && !found.has(title)) found.set(title, { view, model });
    }
  }
  $("elsewhere").hidden = !found.size;
  $("elsewhere").replaceChildren("Other models:", ...[...found].map(([title, { view, model }]) => {
    const button = el("button", { type: "button", class: "link", title: model.id, "aria-label": `${title}, with ${model.id}` }, title);
    button.addEventListener("click", () => { wanted = view.id; chooseModel(model.id); $(`tab-${view.id}`).focus(); });
    return button;
  }));
}

function chooseModel(id) {
  $("model").value = id;
  showStates();
  showModel();
  writeAddress();
}

function showComparison() {
  const others = allModels().filter((model) => model !== chosen());
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
$("model").addEventListener("change", () => chooseModel($("model").value));
$("compare-toggle").addEventListener("click", () => {
  const open = $("compare").hidden;
  $("compare").hidden = !open;
  $("compare-toggle").setAttribute("aria-expanded", String(open));
  if (!open) { compared.clear(); showComparison(); for (const panel of panels.values()) panel.clear?.(); }
});

// ── Tabs ─────────────────────────────────────────────────────────────────────────────────────────

function tabOf(view, model) {
  const tab = el("button", { type: "button", role: "tab", id: `tab-${view.id}`, "aria-controls": view.id }, titleOf(view, model));
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

function choose(view, byUser) {
  const id = panels.has(view) ? view : panels.keys().next().value;
  for (const [name, panel] of panels) {
    const tab = $(`tab-${name}`), isChosen = name === id;
    tab.setAttribute("aria-selected", String(isChosen));
    tab.tabIndex = isChosen ? 0 : -1;
    panel.node.hidden = !isChosen;
    panel.show?.(isChosen);
  }
  if (!byUser) return;
  wanted = id;
  $(`tab-${id}`).focus();
  writeAddress();
}

/** The address has the tab and, where there are several, the model: #rank/reranker. */
function readAddress() {
  const [view, ...rest] = location.hash.slice(1).split("/");
  try { return [view, decodeURIComponent(rest.join("/"))]; } catch { return [view, ""]; }
}
function writeAddress() {
  const view = [...panels].find(([, { node }]) => !node.hidden)[0];
  history.replaceState(null, "", allModels().length > 1 ? `#${view}/${encodeURIComponent(chosen().id)}` : `#${view}`);
}
addEventListener("hashchange", () => {
  if (!panels.size) return;
  wanted = readAddress()[0];
  const model = hasView(chosen(), wanted) && !readAddress()[1] ? chosen() : firstModel();
  if (model === chosen()) choose(wanted, false); else chooseModel(model.id);
});

// ── API key ──────────────────────────────────────────────────────────────────────────────────────

function openKeyForm(open) {
  $("key-form").hidden = !open;
  $("key-toggle").setAttribute("aria-expanded", String(open));
  if (open) $("key").focus();
}

/** Asks for a key; `retry` runs once one is accepted. */
function needKey(retry, error = null) {
  afterKey = retry;
  if (!allModels().length) showNothing("With the key, this page shows what the server's models can do.");
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
  forgetOperator();
  if (!(await loadModels())) return;
  for (const panel of panels.values()) { panel.snippets.write(); panel.show?.(!panel.node.hidden); }
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
  else if (allModels().length) readModels().catch(() => {});  // their states; they may also come and go
  wasReady = isReady;
  setTimeout(() => {  // not at all while nobody looks
    if (document.hidden) document.addEventListener("visibilitychange", watch, { once: true }); else watch();
  }, isReady ? READY_MS : NOT_READY_MS);
}

loadModels();
watch();
ask("/version").then(({ answer }) => { $("version").textContent = answer.version; }, () => {});
