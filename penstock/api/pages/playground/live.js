// What the server is doing: throughput, queue and batches, read from /metrics once a second while the tab is open.

import { Refused, askText } from "./client.js";
import { sparkline } from "./charts.js";
import { el, milliseconds, percent } from "./dom.js";
import { ModelTable } from "./model_table.js";
import { showError } from "./panel.js";
import { SnippetCard } from "./snippets.js";

const EVERY_MS = 1000;
const POINTS = 60;
const OWN_ROUTES = new Set(["/metrics", "/ready", "/health", "/live", "/version", "/v1/models", "/is_sleeping", "/openapi.json", "/docs", "/", "/static/{file}", "other"]);
const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;

const MODEL = /(?:^|,)model="((?:[^"\\]|\\.)*)"/;
const ESCAPED = { "\\n": "\n", '\\"': '"', "\\\\": "\\" };

/**
 * Sums of the samples by name: `total` over everything, and `of(model)` over the samples of one model.
 * Requests for pages and for these numbers themselves are left out.
 */
export function parseMetrics(text) {
  const total = new Map(), byModel = new Map();
  const add = (sums, name, value) => sums.set(name, (sums.get(name) ?? 0) + value);
  for (const line of text.split("\n")) {
    const found = SAMPLE.exec(line);
    if (!found) continue;
    const [, name, labels, value] = found;
    const route = name === "penstock_requests_total" && /(?:^|,)route="([^"]*)"/.exec(labels ?? "");
    if (route && OWN_ROUTES.has(route[1])) continue;
    add(total, name, Number(value));
    const model = MODEL.exec(labels ?? "")?.[1].replace(/\\./g, (pair) => ESCAPED[pair] ?? pair);
    if (model === undefined) continue;
    if (!byModel.has(model)) byModel.set(model, new Map());
    add(byModel.get(model), name, Number(value));
  }
  return { total, of: (model) => byModel.get(model) ?? new Map() };
}

const number = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const rate = (name) => (now, before, seconds) => Math.max(0, ((now.get(name) ?? 0) - (before.get(name) ?? 0)) / seconds);
const gauge = (name) => (now) => now.get(name) ?? 0;
/** The mean of a histogram since the last time; 0 if nothing was observed. */
const mean = (name) => (now, before) => {
  const count = (now.get(`${name}_count`) ?? 0) - (before.get(`${name}_count`) ?? 0);
  return count > 0 ? ((now.get(`${name}_sum`) ?? 0) - (before.get(`${name}_sum`) ?? 0)) / count : 0;
};

const GRAPHS = [
  { id: "requests", label: "Requests per second", value: rate("penstock_requests_total"), shown: number },
  { id: "tokens", label: "Tokens read per second", value: rate("penstock_tokens_total"), shown: number },
  { id: "generated", label: "Tokens generated per second", value: rate("penstock_generated_tokens_total"), shown: number },
  { id: "in-flight", label: "Requests in flight", value: gauge("penstock_requests_in_flight"), shown: number },
  { id: "queue", label: "Rows waiting", value: gauge("penstock_queue_rows"), shown: number },
  { id: "running", label: "Rows running", value: gauge("penstock_running_rows"), shown: number },
  { id: "wait", label: "Mean time in the queue", value: (...args) => 1000 * mean("penstock_queue_seconds")(...args), shown: milliseconds },
  { id: "fill", label: "Batch fill", hint: "tokens of a step / its budget", value: mean("penstock_batch_fill"), shown: percent, top: 1 },
  { id: "busy", label: "Device busy", value: (...args) => Math.min(1, rate("penstock_device_seconds_total")(...args)), shown: percent, top: 1 },
];

const MODEL_FIGURES = [
  { label: "Waiting", value: gauge("penstock_queue_rows"), shown: number },
  { label: "Running", value: gauge("penstock_running_rows"), shown: number },
  { label: "Steps/s", value: rate("penstock_step_seconds_count"), shown: number },
  { label: "Tokens/s", hint: "read and generated", shown: number,
    value: (...args) => rate("penstock_tokens_total")(...args) + rate("penstock_generated_tokens_total")(...args) },
];

export class LivePanel {
  constructor(view) {
    this.view = view;
    this.isShown = false;
    this.history = GRAPHS.map(() => []);
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.graphs = GRAPHS.map(({ id, label, hint }) => {
      const value = el("b", {}, "–"), place = el("div");
      return { value, place, node: el("section", { class: "card graph", id: `live-${id}` },
        el("h3", { title: hint }, label), value, place) };
    });
    this.snippets = new SnippetCard("live", () => ({ path: "/metrics", body: null }));
    this.snippets.write();
    this.status = el("span", { class: "aside said", role: "status" });
    this.ordered = el("p", { class: "aside ordered", role: "status" });
    this.refused = el("p", { class: "error", role: "alert", hidden: true });
    this.table = new ModelTable(MODEL_FIGURES, (words, error) => { this.ordered.textContent = words; showError(this.refused, error); });
    const about = el("section", { class: "card form" }, el("h2", {}, "Live"),
      el("p", { class: "about" }, "All requests of all clients of this server, for the last minute. Send some from another tab."), this.status, this.ordered, this.refused, this.error);
    this.node = el("section", { class: "panel", id: "live", role: "tabpanel", "aria-labelledby": "tab-live", tabindex: "-1" },
      about, el("div", { class: "results graphs" }, this.table.node, this.graphs.map(({ node }) => node)), this.snippets.node);
    document.addEventListener("visibilitychange", () => this.schedule(0));
  }

  /** Called when the tab is opened or closed. */
  show(isShown) {
    this.isShown = isShown;
    this.schedule(0);
  }

  schedule(delay) {
    clearTimeout(this.timer);
    if (this.isShown && !document.hidden && this.node.isConnected) this.timer = setTimeout(() => this.poll(), delay);
    else this.before = null;  // rates begin again: nobody looked in between
  }

  async poll() {
    clearTimeout(this.timer);
    if (this.isPolling) return;
    this.isPolling = true;
    try {
      await this.table.refresh();
      const now = parseMetrics(await askText("/metrics")), at = performance.now();
      if (this.before) this.draw(now, (at - this.before.at) / 1000);
      this.before = { now, at };
      this.status.textContent = "Updated every second.";
      showError(this.error, null);
    } catch (error) {
      if (!(error instanceof Refused)) console.error(error);
      this.status.textContent = "";
      showError(this.error, error);
    }
    this.isPolling = false;
    this.schedule(EVERY_MS);
  }

  draw(now, seconds) {
    this.node.dataset.samples = String(Number(this.node.dataset.samples ?? 0) + 1);
    this.table.draw(now.of, this.before.now.of, seconds);
    GRAPHS.forEach(({ value, shown, top, label }, i) => {
      const latest = value(now.total, this.before.now.total, seconds), values = this.history[i];
      values.push(latest);
      if (values.length > POINTS) values.shift();
      this.graphs[i].value.textContent = shown(latest);
      this.graphs[i].place.replaceChildren(sparkline(values, { size: POINTS, top, label: `${label}: ${shown(latest)}` }));
    });
  }
}

export const live = { id: "live", title: "Live", offered: () => true };
