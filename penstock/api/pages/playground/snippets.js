// The request on screen as a curl command and as a Python program.

import { BASE, Refused, hasKey } from "./client.js";
import { el } from "./dom.js";
import { fileOf } from "./images.js";

const KEY_VARIABLE = "PENSTOCK_API_KEY";
const shellQuoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** The images of a body; the snippets read them from their files again. */
function imagesOf(value) {
  if (fileOf(value)) return [value];
  return value && typeof value === "object" ? Object.values(value).flatMap(imagesOf) : [];
}

/** A body with images for the standard input of curl: an argument of a command may not be that long. */
function hereDocument(body, images) {
  const mark = "\uE000";  // not in texts: it has no meaning in Unicode
  const json = JSON.stringify(body, (_, value) => (fileOf(value) ? mark + images.indexOf(value) + mark : value), 2);
  const written = json.replace(/[\\$`]/g, "\\$&").replace(new RegExp(`${mark}(\\d+)${mark}`, "g"), (_, at) => {
    const uri = images[at], head = uri.slice(0, uri.indexOf(",") + 1);
    return `${head}$(base64 < ${shellQuoted(fileOf(uri))} | tr -d '\\n')`;
  });
  return `--data-binary @- <<BODY\n${written}\nBODY`;
}

export function curl({ path, body }) {
  const parts = [`curl -s${body?.stream ? "N" : ""} ${shellQuoted(BASE + path.slice(1))}`];
  if (hasKey()) parts.push(`-H "Authorization: Bearer $${KEY_VARIABLE}"`);
  const images = imagesOf(body);
  if (body) parts.push("-H 'Content-Type: application/json'",
    images.length ? hereDocument(body, images) : `-d ${shellQuoted(JSON.stringify(body, null, 2))}`);
  return parts.join(" \\\n  ");
}

/** A JSON value as Python writes it. JSON's string literals are Python's as well. */
export function pythonValue(value, indent = "") {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (fileOf(value)) return `image(${JSON.stringify(fileOf(value))})`;
  if (typeof value !== "object") return JSON.stringify(value);
  const deeper = `${indent}    `, isList = Array.isArray(value);
  const items = isList ? value.map((item) => pythonValue(item, deeper))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${pythonValue(item, deeper)}`);
  const [open, close] = isList ? "[]" : "{}";
  const line = `${open}${items.join(", ")}${close}`;
  if (!items.length || (line.length <= 80 && !line.includes("\n"))) return line;
  return `${open}\n${items.map((item) => `${deeper}${item},\n`).join("")}${indent}${close}`;
}

/** Arguments of a call, one to a line; fields that the package does not know go to `extra_body`. */
function argumentsOf(body, known) {
  const given = Object.entries(body).filter(([name]) => known.includes(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !known.includes(name)));
  const lines = given.map(([name, value]) => `    ${name}=${pythonValue(value, "    ")},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${pythonValue(extra, "    ")},`);
  return lines;
}

const OPENAI = {
  "/v1/embeddings": {
    known: ["model", "input", "dimensions", "encoding_format"],
    extra: { encoding_format: "float" },
    call: "answer = client.embeddings.create(",
    after: ["vectors = [row.embedding for row in answer.data]", "print(len(vectors), len(vectors[0]))"],
  },
  "/v1/chat/completions": {
    known: ["model", "messages", "max_tokens", "temperature", "stream", "stream_options"],
    call: "answer = client.chat.completions.create(",
    after: ["for chunk in answer:", "    for choice in chunk.choices:", '        print(choice.delta.content or "", end="", flush=True)', "print()"],
  },
  "/v1/completions": {
    known: ["model", "prompt", "max_tokens", "temperature", "stream", "stream_options"],
    call: "answer = client.completions.create(",
    after: ["for chunk in answer:", "    for choice in chunk.choices:", '        print(choice.text, end="", flush=True)', "print()"],
  },
};

const IMAGE_IMPORTS = ["import base64", "import mimetypes"];
const IMAGE_FUNCTION = ["def image(name):", '    with open(name, "rb") as file:', "        data = base64.b64encode(file.read()).decode()",
  '    return f"data:{mimetypes.guess_type(name)[0]};base64,{data}"', "", ""];

export function python({ path, body }) {
  const package_ = OPENAI[path], hasImages = imagesOf(body).length > 0;
  const imports = [...(hasImages ? IMAGE_IMPORTS : []), ...(hasKey() ? ["import os"] : [])];
  const head = imports.length ? [...imports, ""] : [], before = hasImages ? ["", ...IMAGE_FUNCTION] : [""];
  const keyed = `os.environ["${KEY_VARIABLE}"]`;
  if (package_) {
    const { known, extra = {}, call, after } = package_;
    return [...head, "from openai import OpenAI", ...before,
      `client = OpenAI(base_url=${pythonValue(`${BASE}v1`)}, api_key=${hasKey() ? keyed : '"none"'})`,
      call, ...argumentsOf({ ...body, ...extra }, known), ")", ...after].join("\n");
  }
  const options = hasKey() ? [`    headers={"Authorization": "Bearer " + ${keyed}},`] : [];
  if (body) options.push(`    json=${pythonValue(body, "    ")},`);
  const address = pythonValue(BASE + path.slice(1));
  const call = `httpx.${body ? "post" : "get"}(`;
  return [...head, "import httpx", ...before, `answer = ${call}`, `    ${address},`, ...options, "    timeout=60,", ")",
    "answer.raise_for_status()", `print(${body ? "answer.json()" : "answer.text"})`].join("\n");
}

/** The card with the code of the request on screen, in the chosen language. */
export class SnippetCard {
  /** `request()` gives what is on screen, or throws Refused. */
  constructor(id, request) {
    this.request = request;
    this.language = "curl";
    this.code = el("pre", { id: `${id}-code`, tabindex: "0", role: "region", "aria-label": "The same request in code" });
    this.choices = [["curl", "curl"], ["python", "Python"]].map(([language, label]) => {
      const button = el("button", { type: "button", "data-language": language }, label);
      button.addEventListener("click", () => { this.language = language; this.write(); });
      return button;
    });
    const copy = el("button", { type: "button", class: "quiet copy" }, "Copy");
    copy.addEventListener("click", () => this.copy(copy));
    this.node = el("section", { class: "card snippets" }, el("h3", {}, "From your code"),
      el("div", { class: "switch", role: "group", "aria-label": "Language" }, this.choices), copy, this.code);
  }

  write() {
    for (const choice of this.choices) choice.setAttribute("aria-pressed", String(choice.dataset.language === this.language));
    try {
      this.code.textContent = (this.language === "curl" ? curl : python)(this.request());
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.code.textContent = `# ${error.message}`;
    }
  }

  async copy(button) {
    try {
      await navigator.clipboard.writeText(this.code.textContent);
      button.textContent = "Copied";
    } catch {  // no clipboard over plain http from another host: select it for the user instead
      getSelection().selectAllChildren(this.code);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }
}
