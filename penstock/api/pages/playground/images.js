// Images that the user chooses: the field of a form, previews, and how requests write them.

import { el } from "./dom.js";

const TYPES = "image/png,image/jpeg,image/webp,image/gif,image/bmp,image/tiff";
const SAMPLE_SIZE = 64;  // pixels
const names = new Map();  // data URI → name
const files = new Set();  // data URIs that were read from a file of the user

/** The name of the user's file behind a data URI; undefined for any other value. */
export const fileOf = (uri) => (files.has(uri) ? names.get(uri) : undefined);

const preview = ({ name, url }) => el("img", { class: "preview", src: url, alt: name, title: name });

/** What a request has as one input, on screen: a text, or a small picture. */
export function inputNode(input) {
  const { text, image } = typeof input === "string" ? { text: input } : input;
  return image ? preview({ name: names.get(image) ?? "image", url: image }) : text;
}

/** The same in words, for titles. */
export const inputName = (input) => (typeof input === "string" ? input : input.text ?? names.get(input.image) ?? "image");

/** Texts and images as the inputs of a request: plain strings if there are no images. */
export const inputsOf = (texts, images) => (images.length
  ? [...texts.map((text) => ({ text })), ...images.map(({ url }) => ({ image: url }))] : texts);

/** The text and images of a message as a chat model gets them. */
export const messageContent = (text, images) => (images.length
  ? [...images.map(({ url }) => ({ type: "image_url", image_url: { url } })), { type: "text", text }] : text);

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

/** Pictures to begin with, drawn here. */
export function sampleImages() {
  const middle = SAMPLE_SIZE / 2, radius = SAMPLE_SIZE * 0.36;
  const shapes = {
    "red-circle.png": ["#c62828", (path) => path.arc(middle, middle, radius, 0, 2 * Math.PI)],
    "blue-square.png": ["#1565c0", (path) => path.rect(middle - radius, middle - radius, 2 * radius, 2 * radius)],
    "green-triangle.png": ["#2e7d32", (path) => { path.moveTo(middle, middle - radius); path.lineTo(middle + radius, middle + radius); path.lineTo(middle - radius, middle + radius); }],
  };
  return Object.entries(shapes).map(([name, [colour, draw]]) => {
    const canvas = el("canvas", { width: SAMPLE_SIZE, height: SAMPLE_SIZE }), paint = canvas.getContext("2d");
    paint.fillStyle = "#fff";
    paint.fillRect(0, 0, SAMPLE_SIZE, SAMPLE_SIZE);
    paint.fillStyle = colour;
    paint.beginPath();
    draw(paint);
    paint.fill();
    const url = canvas.toDataURL("image/png");
    names.set(url, name);
    return { name, url };
  });
}

/** A field whose value is a list of {name, url}. Files are chosen, or dropped on it. */
export class ImagePicker {
  constructor(attributes, { label, hint, value = [] }) {
    this.images = value;
    this.input = el("input", { ...attributes, type: "file", accept: TYPES, multiple: true });
    this.previews = el("ul", { class: "previews" });
    this.said = el("p", { class: "error", role: "alert", hidden: true });
    this.node = el("div", { class: "wide images" },
      el("label", { for: attributes.id }, label, hint ? el("span", { class: "aside" }, hint) : null), this.input, this.previews, this.said);
    this.input.addEventListener("change", () => { this.add([...this.input.files]); this.input.value = ""; });
    this.node.addEventListener("dragover", (event) => event.preventDefault());
    this.node.addEventListener("drop", (event) => { event.preventDefault(); this.add([...event.dataTransfer.files]); });
    this.show();
  }

  async add(chosen) {
    this.said.hidden = true;
    for (const file of chosen) {
      try {
        const url = await read(file);
        names.set(url, file.name);
        files.add(url);
        this.images = [...this.images, { name: file.name, url }];
      } catch (error) {
        this.said.textContent = `${file.name} cannot be read: ${error.message}`;
        this.said.hidden = false;
      }
    }
    this.changed();
  }

  set(images) {
    this.images = images;
    this.changed();
  }

  changed() {
    this.show();
    this.node.dispatchEvent(new Event("input", { bubbles: true }));
  }

  show() {
    this.previews.hidden = !this.images.length;
    this.previews.replaceChildren(...this.images.map((image, at) => {
      const remove = el("button", { type: "button", class: "quiet", "aria-label": `Remove ${image.name}` }, "×");
      remove.addEventListener("click", () => this.set(this.images.filter((_, other) => other !== at)));
      return el("li", {}, preview(image), remove);
    }));
  }
}
