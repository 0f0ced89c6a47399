// Builds elements. Everything from the server or the user reaches the page as text, never as markup.

export const $ = (id) => document.getElementById(id);

/** An element with attributes and children. `style` is an object of properties; null and false are left out. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function card(title, aside, ...content) {
  const head = el("h3", {}, title, aside ? el("span", { class: "aside" }, aside) : null);
  return el("section", { class: "card" }, head, ...content);
}

/** A part of the page that scrolls sideways by itself, with the keyboard too. */
export const scrolling = (label, child) => el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, child);

export const nonEmptyLines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);
export const commaSeparated = (text) => text.split(/[,\n]/).map((part) => part.trim()).filter(Boolean);
export const milliseconds = (ms) => (ms < 10 ? `${ms.toFixed(2)} ms` : ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(2)} s`);
export const fixed = (value, digits) => value.toFixed(digits).replace(/^-(0\.?0*)$/, "$1");  // no “-0.00”
export const percent = (value) => `${(value * 100).toFixed(1)} %`;
export const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
