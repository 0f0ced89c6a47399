// The models of the live view: state and load of each, and buttons for an operator to have it sleep and wake.

import { ask, hasKey } from "./client.js";
import { card, el, scrolling } from "./dom.js";
import { baseModels, badge, readModels, stateOf } from "./models.js";

const ADMIN_ROUTE = "/is_sleeping";  // it needs the admin key and changes nothing
const ORDERS = { awake: { label: "Sleep", action: "sleep" }, asleep: { label: "Wake", action: "wake" } };

let isOperator = null;  // whether the key opens admin routes; null: nobody has asked yet

/** The page has another key. */
export function forgetOperator() {
  isOperator = null;
}

/** Whether the key that the user entered is an admin key. Without one, nothing is asked. `tell` says if nobody knows it. */
async function canOrder(tell) {
  if (!hasKey()) return false;
  if (isOperator !== null) return isOperator;
  try {
    await ask(ADMIN_ROUTE);
    isOperator = true;
    tell("", null);
  } catch (error) {
    if ([401, 403, 404].includes(error.status)) isOperator = false;
    if (error.status === 401) tell("The server does not know this key.", null);
  }
  return isOperator === true;
}

class Row {
  /** `onOrder(action, id)` carries out an order. */
  constructor({ id, root }, figures, onOrder) {
    this.id = id;
    this.root = root;  // the name that metrics have
    this.cells = figures.map(() => el("td", { class: "figure" }, "–"));
    this.button = el("button", { type: "button", class: "quiet" });
    this.button.addEventListener("click", async () => {
      const { action } = ORDERS[stateOf(id)] ?? {};
      if (!action || this.isOrdered) return;
      this.isOrdered = true;
      this.showButton();
      await onOrder(action, id);
      this.isOrdered = false;
      this.showButton();
    });
    this.place = el("td", { class: "order", hidden: true }, this.button);
    this.node = el("tr", {}, el("th", { scope: "row" }, id), el("td", {}, badge(id)), this.place, this.cells);
    this.showButton();
  }

  showButton() {
    const order = ORDERS[stateOf(this.id)], label = order?.label ?? "…";
    if (this.button.textContent !== label) this.button.textContent = label;
    this.button.setAttribute("aria-label", order ? `${label} ${this.id}` : `${this.id} is ${stateOf(this.id)}`);
    this.button.setAttribute("aria-disabled", String(!order || Boolean(this.isOrdered)));  // it keeps the focus
  }
}

export class ModelTable {
  /** `figures` has { label, hint, value(now, before, seconds), shown }; `tell(words, error)` says what became of an order. */
  constructor(figures, tell) {
    this.figures = figures;
    this.tell = tell;
    this.rows = [];
    this.body = el("tbody");
    this.orders = el("th", { scope: "col", hidden: true }, "Order");
    const column = (label, title) => el("th", { scope: "col", title }, label);
    const head = el("tr", {}, column("Model"), column("State"), this.orders, figures.map(({ label, hint }) => column(label, hint)));
    const table = el("table", { class: "list" }, el("thead", {}, head), this.body);
    this.node = card("Models", null, scrolling("State and load of each model", table));
    this.node.id = "live-models";
    this.build();
  }

  build() {
    this.rows = baseModels().map((model) => new Row(model, this.figures, (action, id) => this.order(action, id)));
    this.body.replaceChildren(...this.rows.map(({ node }) => node));
  }

  /** Reads the states again; shows the buttons if the key allows orders. One model alone needs no table without them. */
  async refresh() {
    const [allowed] = await Promise.all([canOrder(this.tell), readModels()]);
    if (this.rows.map(({ id }) => id).join() !== baseModels().map(({ id }) => id).join()) this.build();
    this.node.hidden = this.rows.length < 2 && !allowed;
    this.orders.hidden = !allowed;
    for (const row of this.rows) {
      row.place.hidden = !allowed;
      row.showButton();
    }
  }

  /** `now(root)` and `before(root)` give the metrics of one model. */
  draw(now, before, seconds) {
    for (const { root, cells } of this.rows) {
      this.figures.forEach(({ value, shown }, i) => { cells[i].textContent = shown(value(now(root), before(root), seconds)); });
    }
  }

  async order(action, id) {
    this.tell(action === "wake" ? `waking ${id} …` : `${id} finishes its requests and falls asleep …`, null);
    try {
      const { answer } = await ask(`/v1/admin/models/${action}`, { model: id });
      const time = answer.seconds < 0.05 ? "" : `, after ${answer.seconds.toFixed(1)} s`;
      this.tell(`${id} is ${answer.state}${time}.`, null);
    } catch (error) {
      if (error.status === 401 || error.status === 403) forgetOperator();
      this.tell("", error);
    }
    await this.refresh().catch(() => {});
  }
}
