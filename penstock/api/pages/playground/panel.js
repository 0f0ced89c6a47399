// One tab: a form, the request that it makes, its snippets, and the results of one or several models.
//
// A view says what is particular about a tab:
//   id, title            the name of the tab
//   heading, about, action   what stands above the form and on its button; or wordsFor(model), if it differs by model
//   offered(model)       whether the model can do it
//   fields(model)        the form (see `Field`)
//   request(values, model)   → { path, body }; throws Refused if something is missing
//   show(result, context)    → { nodes, said } from the answer; or
//   run(context)             → { nodes, said }, for views that do more than one request or that stream
//   needsEngine          false: it is answered while the model sleeps
//   asYouType            it runs while the user types
//   keeps                its results stay when the form changes or a request fails: a conversation

import { Refused, ask } from "./client.js";
import { el } from "./dom.js";
import { ImagePicker } from "./images.js";
import { hasToWake, readModels } from "./models.js";
import { SnippetCard } from "./snippets.js";

const TYPING_MS = 250;
const STATES_MS = 500;  // between looks at the states of models while a request runs
const pause = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });

/** A field of a form: { name, label, kind, value, … }. `param` is the field of the request that errors name. */
class Field {
  constructor(viewId, spec) {
    this.spec = spec;
    const id = `${viewId}-${spec.name}`;
    const common = { id, "data-param": spec.param ?? spec.name, placeholder: spec.placeholder, spellcheck: "false" };
    if (spec.kind === "images") {
      this.picker = new ImagePicker(common, spec);
      this.input = this.picker.input;
      this.node = this.picker.node;
      return;
    }
    this.input = {
      lines: () => el("textarea", { ...common, rows: spec.rows ?? 8 }),
      text: () => el("textarea", { ...common, rows: spec.rows ?? 4 }),
      line: () => el("input", { ...common, type: "text", autocomplete: "off" }),
      number: () => el("input", { ...common, type: "number", min: spec.min, max: spec.max, step: spec.step ?? "any" }),
      select: () => el("select", common, spec.options.map(([value, label]) => el("option", { value }, label))),
      check: () => el("input", { ...common, type: "checkbox" }),
    }[spec.kind]();
    if (spec.kind === "check") this.input.checked = Boolean(spec.value);
    else if (spec.value !== undefined) this.input.value = spec.value;
    const hint = spec.hint ? el("span", { class: "aside" }, spec.hint) : null;
    const label = el("label", { for: id }, spec.label, hint);
    this.node = spec.kind === "check" ? el("div", { class: "check wide" }, this.input, label)
      : el("div", { class: spec.wide || !spec.option ? "wide" : null }, label, this.input);
  }

  get value() {
    if (this.picker) return this.picker.images;
    if (this.spec.kind === "check") return this.input.checked;
    if (this.spec.kind === "number") return this.input.value === "" ? undefined : Number(this.input.value);
    return this.input.value;
  }

  /** What the user wrote, if it is not what stood here; options are left to each model. */
  get draft() {
    const { kind, option, value = "" } = this.spec;
    return ["lines", "text", "line"].includes(kind) && !option && this.input.value !== value ? this.input.value : null;
  }
}

/** Shows an error, or hides the place if there is none. */
export function showError(place, error) {
  place.hidden = !error;
  if (!error) return place.replaceChildren();
  const { message, status, param, retryAfter } = error;
  const facts = [status, param].filter(Boolean).join(" · ");
  place.replaceChildren(...[facts ? el("b", {}, facts) : "", ` ${message}`, retryAfter ? `${/[.!?]$/.test(message) ? "" : "."} Try again in ${retryAfter} s.` : ""]);
}

export class Panel {
  /** `app` has `columns(view)` (the models to run, the chosen one first) and `needKey(retry)`. */
  constructor(view, model, app) {
    this.view = view;
    this.app = app;
    this.state = {};  // what a view keeps between runs, such as a conversation
    this.runs = 0;  // the newest run's number: older ones have no say any more
    this.build(model);
  }

  build(model) {
    const { view } = this, { heading, about, action } = view.wordsFor?.(model) ?? view;
    this.fields = view.fields(model).map((spec) => new Field(view.id, spec));
    const shown = this.fields.filter(({ spec }) => !spec.option), options = this.fields.filter(({ spec }) => spec.option);
    this.button = el("button", { class: "main" }, action);
    this.stop = el("button", { type: "button", class: "quiet", hidden: true }, "Stop");
    this.said = el("span", { class: "aside said", role: "status" });
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.results = el("div", { class: "results" });
    this.snippets = new SnippetCard(view.id, () => this.requestOnScreen());
    const keys = view.sendsOnEnter ? ["Enter"] : ["Ctrl", "Enter"];
    const hint = el("span", { class: "aside keys" }, view.asYouType ? "also as you type" : keys.map((name) => el("kbd", {}, name)));
    this.form = el("form", { class: "card form", novalidate: true },
      el("h2", {}, heading), el("p", { class: "about" }, about),
      el("div", { class: "fields" }, shown.map(({ node }) => node)),
      options.length ? el("details", { class: "options" }, el("summary", {}, "Options"),
        el("div", { class: "fields" }, options.map(({ node }) => node))) : null,
      el("div", { class: "run" }, this.button, this.stop, this.said, hint), this.error);
    this.node = el("section", { class: "panel", id: view.id, role: "tabpanel", "aria-labelledby": `tab-${view.id}`, tabindex: "-1" },
      this.form, this.results, this.snippets.node);
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.run(); });
    this.form.addEventListener("keydown", (event) => {
      const isText = event.target.tagName === "TEXTAREA";
      if (event.key !== "Enter" || !isText) return;
      if (event.ctrlKey || event.metaKey || (view.sendsOnEnter && !event.shiftKey)) { event.preventDefault(); this.run(); }
    });
    this.form.addEventListener("input", () => this.changed());
    this.stop.addEventListener("click", () => this.abort());
    this.clear();
    this.changed();
  }

  /** What the user wrote, by field; `write` puts it into the panel of another model. */
  get drafts() {
    return this.fields.filter(({ draft }) => draft !== null).map(({ spec, draft }) => [spec.name, draft]);
  }

  write(drafts) {
    for (const [name, text] of drafts) {
      const field = this.fields.find(({ spec }) => spec.name === name);
      if (field) field.input.value = text;
    }
    if (drafts.length) this.changed();
  }

  get values() {
    return Object.fromEntries(this.fields.map(({ spec, value }) => [spec.name, value]));
  }

  field(name) {
    return this.fields.find(({ spec }) => spec.name === name).input;
  }

  /** The images of a field, if the form has it. */
  picker(name) {
    return this.fields.find(({ spec }) => spec.name === name)?.picker;
  }

  /** Something in the form is new: fields that depend on others, the snippets, and what stood for older input. */
  changed() {
    const values = this.values;
    for (const { spec, node } of this.fields) if (spec.when) node.hidden = !spec.when(values);
    this.snippets.write();
    this.results.classList.toggle("outdated", this.results.childElementCount > 0 && !this.isEmpty && !this.view.keeps);
    if (!this.view.asYouType) return;
    clearTimeout(this.typing);
    if (!this.isEmpty) this.typing = setTimeout(() => this.run(), TYPING_MS);
  }

  clear() {
    this.isEmpty = true;
    this.results.classList.remove("outdated");
    this.results.replaceChildren(el("p", { class: "card empty" }, this.view.empty));
    this.said.textContent = "";
    this.complain(null);
  }

  abort() {
    this.controller?.abort();
  }

  /** Runs the request for every model on screen. A newer run ends this one, which then shows nothing. */
  async run() {
    clearTimeout(this.typing);
    this.abort();
    const number = ++this.runs, isNewest = () => number === this.runs;
    this.controller = new AbortController();
    const { signal } = this.controller, models = this.app.columns(this.view), values = this.values;
    this.clear();
    try {
      this.sent = this.view.request(values, models[0], this.state);
    } catch (error) {
      return this.complain(error);
    }
    const slots = models.map((model) => new Slot(model, models.length > 1));
    this.isEmpty = false;
    this.results.replaceChildren(models.length > 1 ? el("div", { class: "columns" }, slots.map(({ node }) => node)) : slots[0].node);
    this.stop.hidden = false;
    this.form.setAttribute("aria-busy", "true");
    let isOver = false;
    if (this.view.needsEngine ?? true) this.tellWaking(models, () => isOver || !isNewest());
    const outcomes = await Promise.all(slots.map((slot) => this.runOne(slot, values, signal)));
    isOver = true;
    if (!isNewest()) return;
    this.stop.hidden = true;
    this.form.removeAttribute("aria-busy");
    this.finish(outcomes, slots);
  }

  /** While a request runs: says which models wake for it. */
  async tellWaking(models, isOver) {
    for (let looks = 0; !isOver(); looks++) {
      const waking = models.filter(({ id }) => hasToWake(id)).map(({ id }) => id);
      const words = waking.length ? `waking ${waking.join(", ")} …` : "";
      if (this.said.textContent !== words) this.said.textContent = words;
      if (looks && !waking.length) return;  // they are awake: the request takes long for another reason
      await pause(STATES_MS);
      if (!isOver()) await readModels().catch(() => {});
    }
    if (models.some(({ id }) => hasToWake(id))) readModels().catch(() => {});  // by now they are awake, or failed
  }

  async runOne(slot, values, signal) {
    const { view, state } = this, { model } = slot;
    try {
      if (!view.offered(model)) throw new Refused(`${model.id} cannot do this.`);
      const request = view.request(values, model, state);
      const context = { model, values, request, signal, state, slot: slot.body, isAlone: !slot.title };
      const done = view.run ? await view.run(context) : view.show(await ask(request.path, request.body, signal), context);
      slot.body.replaceChildren(...done.nodes);
      return { said: done.said };
    } catch (error) {
      return { error };
    }
  }

  finish(outcomes, slots) {
    const stopped = outcomes.some(({ error }) => error?.name === "AbortError");
    const [{ said, error }] = outcomes;
    this.said.textContent = stopped ? "Stopped." : said ?? "";
    outcomes.forEach((outcome, i) => { if (outcome.error) slots[i].fail(outcome.error, this.view.keeps); });
    if (slots.length === 1 && error) {
      if (!slots[0].body.childElementCount) this.clear();
      this.said.textContent = stopped ? "Stopped." : "";
      if (!stopped) this.complain(error);
    }
    if (outcomes.some((outcome) => outcome.error?.status === 503)) readModels().catch(() => {});  // their states
    if (outcomes.some((outcome) => outcome.error?.status === 401)) this.app.needKey(() => this.run());
    this.view.afterRun?.(this, outcomes);
    this.snippets.write();
  }

  complain(error) {
    if (error && !(error instanceof Refused)) console.error(error);
    showError(this.error, error);
    for (const { input, spec } of this.fields) {
      const names = (spec.param ?? spec.name).split(" ");
      if (error?.param && names.includes(error.param)) input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
    }
  }

  /** What is sent next; after a message was sent, what was sent. */
  requestOnScreen() {
    const [model] = this.app.columns(this.view);
    try {
      return this.view.request(this.values, model, this.state);
    } catch (error) {
      if (this.view.keeps && this.sent) return this.sent;
      throw error;
    }
  }
}

/** Where the results of one model go. */
class Slot {
  constructor(model, titled) {
    this.model = model;
    this.title = titled ? el("h3", { class: "model" }, model.id) : null;
    this.body = el("div", { class: "slot" });
    this.node = el("div", { class: "column" }, this.title, this.body);
  }

  /** Next to other models, an error stands in this model's column. */
  fail(error, keeps) {
    if (!keeps) this.body.replaceChildren();
    if (!this.title || error.name === "AbortError") return;
    const place = el("p", { class: "error", role: "alert" });
    showError(place, error);
    this.body.append(place);
  }
}
