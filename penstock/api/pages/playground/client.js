// Talks to the server: requests, streams, errors, and the API key, which this browser tab keeps.

export const BASE = new URL(".", location.href).href;  // relative: a proxy may serve us under a prefix
const KEY_NAME = "penstock-key";

/** A request that was refused, by the server or by the page itself. */
export class Refused extends Error {
  constructor(message, facts = {}) {  // facts: status, param (the field at fault), retryAfter in seconds
    super(message);
    Object.assign(this, facts);
  }
}

let key = "";
try { key = sessionStorage.getItem(KEY_NAME) ?? ""; } catch { /* storage is off: memory only */ }
export const hasKey = () => key !== "";
export function setKey(given) {
  if (/[^\x21-\x7e]/.test(given)) throw new Refused("A key has visible ASCII characters only.");
  key = given;
  try { sessionStorage.setItem(KEY_NAME, key); } catch { /* memory only */ }
}

/** The server's own words, whichever dialect's error shape they come in. */
function refusal({ status, statusText, headers }, answer) {
  const error = answer?.error;
  const message = error?.message ?? (typeof error === "string" ? error : answer?.message ?? answer?.detail) ?? statusText;
  return new Refused(message || "no reason given", { status, param: error?.param, retryAfter: headers.get("retry-after") });
}

async function send(path, body, signal) {
  const headers = {};
  if (body) headers["content-type"] = "application/json";
  if (key) headers.authorization = `Bearer ${key}`;
  try {
    return await fetch(BASE + path.slice(1), { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (cause) {
    if (cause.name === "AbortError") throw cause;
    throw new Refused("The server does not answer. Is it still running?");
  }
}

async function textOf(response) {
  try {
    return await response.text();
  } catch (cause) {
    if (cause.name === "AbortError") throw cause;
    throw new Refused("The connection ended before the answer was complete.");
  }
}

function parsed(text) {
  try { return JSON.parse(text); } catch { return null; }
}

export async function ask(path, body, signal) {
  const began = performance.now();
  const response = await send(path, body, signal);
  const answer = parsed(await textOf(response));
  if (!response.ok) throw refusal(response, answer);
  if (answer === null) throw new Refused(`${path} answered with something that is not JSON`, { status: response.status });
  return { answer, headers: response.headers, wallMs: performance.now() - began };
}

export async function askText(path, signal) {
  const response = await send(path, null, signal);
  const text = await textOf(response);
  if (!response.ok) throw refusal(response, parsed(text));
  return text;
}

/** Reads server-sent events until [DONE]; calls `onEvent` with each one's JSON. */
export async function stream(path, body, signal, onEvent) {
  const response = await send(path, body, signal);
  if (!response.ok) throw refusal(response, parsed(await textOf(response)));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Refused("The connection ended before the answer was complete.");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: ?/, "");
      if (data === "[DONE]") return response.headers;
      const content = parsed(data);
      if (content?.error) throw refusal({ status: content.error.code, statusText: "", headers: response.headers }, content);
      if (content) onEvent(content);
    }
  }
}
