// Pictures of numbers: heat maps, bars, vectors, time, and graphs over time.

import { el, fixed, milliseconds, svg } from "./dom.js";
import { inputName, inputNode } from "./images.js";

/** Where colours begin: just below the least value, so that high values that differ little can be told apart. */
export const heatFloor = (values) => Math.max(0, values.flat().reduce((least, value) => Math.min(least, value), 1) - 0.05);

/** The background of a value from -1 to 1; up to `most`, a number stays readable on it. */
export function heat(value, floor = 0, most = 0.62) {
  const strength = Math.min(1, Math.max(0, (Math.abs(value) - floor) / (1 - floor || 1))) * most;
  return { background: `rgb(var(${value < 0 ? "--neg" : "--pos"}) / ${strength.toFixed(3)})` };
}

/** Labels with bars: rows of {name, value, share (0 to 1), shown, strong}. */
export function bars(rows) {
  return el("ul", { class: "bars" }, rows.map(({ name, share, shown, strong }) =>
    el("li", { class: strong ? "strong" : null }, el("span", { class: "name", title: name }, name),
      el("span", { class: "track", "aria-hidden": "true" },
        el("i", { style: { width: `${(Math.max(0, Math.min(1, share)) * 100).toFixed(1)}%` } })),
      el("data", {}, shown))));
}

/** The values of a vector as a strip of colours. It is painted again when the colour scheme changes. */
export function strip(vector, label) {
  const canvas = el("canvas", { class: "strip", width: vector.length, height: 1, role: "img", "aria-label": label });
  const top = vector.reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;
  canvas.repaint = () => {
    const paint = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const colours = ["--neg", "--pos"].map((name) => style.getPropertyValue(name).trim());
    paint.clearRect(0, 0, vector.length, 1);
    vector.forEach((value, i) => {
      paint.fillStyle = `rgb(${colours[+(value > 0)]} / ${Math.sqrt(Math.abs(value) / top).toFixed(3)})`;
      paint.fillRect(i, 0, 1, 1);
    });
  };
  canvas.repaint();
  return canvas;
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const canvas of document.querySelectorAll("canvas.strip")) canvas.repaint?.();
});

const PHASES = [["tokenise", "tokenize", "--tokenize"], ["queue", "queue", "--queue"], ["device", "device", "--device"]];

/** Where the time of a request went, by the headers of its answer. */
export function timing({ headers, wallMs }, ...facts) {
  const ms = (name) => Number(headers.get(`x-${name}-ms`) ?? 0);
  const total = ms("total"), parts = PHASES.map(([name, header, colour]) => ({ name, colour, value: ms(header) }));
  const rest = Math.max(0, total - parts.reduce((sum, { value }) => sum + value, 0));
  parts.push({ name: "rest", colour: "--rest", value: rest });
  const truncated = Number(headers.get("x-truncated-rows") ?? 0);
  const words = [`${milliseconds(total)} in the server`, `${milliseconds(wallMs)} seen from here`, ...facts.filter(Boolean)];
  if (truncated) words.push(`${truncated} cut to fit`);
  return el("section", { class: "timing" },
    el("p", {}, words.join(" · ")),
    el("div", { class: "phases", "aria-hidden": "true" },
      parts.map(({ value, colour }) => el("i", { style: { "flex-grow": String(value), background: `var(${colour})` } }))),
    el("ul", { class: "legend" }, parts.map(({ name, value, colour }) =>
      el("li", {}, el("i", { style: { background: `var(${colour})` } }), `${name} ${milliseconds(value)}`))));
}

/** A small graph of the last values; the newest is at the right. */
export function sparkline(values, { size, top, label }) {
  const most = top ?? Math.max(1e-9, ...values);
  const point = (value, i) => `${(100 * (i + size - values.length)) / Math.max(1, size - 1)},${(28 - 26 * Math.min(1, value / most)).toFixed(2)}`;
  const points = values.map(point);
  const first = (100 * (size - values.length)) / Math.max(1, size - 1);
  const line = svg("polyline", { points: points.join(" "), class: "line" });
  const area = svg("polygon", { points: `${first},29 ${points.join(" ")} 100,29`, class: "area" });
  return svg("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", class: "spark", role: "img", "aria-label": label }, area, line);
}

/** A table of similarities of texts and images among each other. Values go from -1 to 1. */
export function similarityTable(inputs, values) {
  const floor = heatFloor(values);
  const head = el("tr", {}, el("td"), inputs.map((input, j) => el("th", { scope: "col", title: inputName(input) }, String(j + 1))));
  const rows = inputs.map((input, i) => el("tr", {},
    el("th", { scope: "row", title: inputName(input) }, el("span", { class: "number" }, String(i + 1)), inputNode(input)),
    values[i].map((value) => el("td", { style: heat(value, floor) }, fixed(value, 2)))));
  return el("table", { class: "matrix" }, el("thead", {}, head), el("tbody", {}, rows));
}
