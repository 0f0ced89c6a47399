// Generated text, as it comes: conversations and plain completions, with their speed.

import { Refused, stream } from "./client.js";
import { el, milliseconds, plural } from "./dom.js";
import { inputNode, messageContent } from "./images.js";

const SAMPLING = [
  { name: "max_tokens", label: "At most this many tokens", kind: "number", min: 1, step: 1, value: 200, option: true },
  { name: "temperature", label: "Temperature", hint: "0: the likeliest", kind: "number", min: 0, max: 2, step: 0.1, value: 0, option: true },
];

function withSampling(body, values) {
  if (values.max_tokens !== undefined) body.max_tokens = values.max_tokens;
  if (values.temperature !== undefined) body.temperature = values.temperature;
  return { ...body, stream: true, stream_options: { include_usage: true } };
}

const MIN_DECODE_MS = 20;

/** Tokens per second after the first. Tokens that arrive together tell nothing of it: then, of the whole request. */
function speed(tokens, began, first, last) {
  const together = last - first < MIN_DECODE_MS;
  return (1000 * (together ? tokens : tokens - 1)) / (last - (together ? began : first));
}

/** Streams a request into `place`, and its speed into `facts`. */
async function write({ path, body }, signal, place, facts, textOf) {
  const began = performance.now();
  let first = null, last = began, usage = null, reason = null, text = "";
  const tell = () => {
    const parts = [];
    if (first !== null) parts.push(`first token ${milliseconds(first - began)}`);
    if (usage) {
      parts.push(plural(usage.completion_tokens, "token"));
      if (usage.completion_tokens > 1 && first !== null) parts.push(`${speed(usage.completion_tokens, began, first, last).toFixed(1)} tokens/s`);
      parts.push(`prompt ${plural(usage.prompt_tokens, "token")}`);
    }
    if (reason) parts.push(reason === "length" ? "ended at the limit of tokens" : reason === "stop" ? "ended by itself" : reason);
    facts.textContent = parts.join(" · ") || "waiting for the first token …";
  };
  tell();
  await stream(path, body, signal, (event) => {
    const [choice] = event.choices ?? [];
    const piece = choice ? textOf(choice) : "";
    if (piece) {
      last = performance.now();
      first ??= last;
      text += piece;
      place.append(piece);
    }
    if (choice?.finish_reason) reason = choice.finish_reason;
    if (event.usage) usage = event.usage;
    tell();
  });
  return { text, said: usage ? plural(usage.completion_tokens, "token") : "" };
}

const bubble = (role, text, images = []) => el("div", { class: `bubble ${role}` }, el("b", {}, role === "user" ? "You" : "Model"),
  images.map(({ url }) => inputNode({ image: url })), el("div", { class: "text" }, text));

/** Messages of a model: its own answers to what the user wrote. */
function messagesOf(values, model, turns) {
  const messages = values.system?.trim() ? [{ role: "system", content: values.system.trim() }] : [];
  for (const { user, images, replies } of turns) {
    if (!(model.id in replies)) continue;
    messages.push({ role: "user", content: messageContent(user, images) }, { role: "assistant", content: replies[model.id] });
  }
  return [...messages, { role: "user", content: messageContent(values.message.trim(), values.images ?? []) }];
}

export const chat = {
  id: "chat", title: "Chat", action: "Send", heading: "Chat", keeps: true, sendsOnEnter: true,
  about: "A conversation through the model's chat template, streamed as it is generated.",
  empty: "Write a message. The answer appears word by word, with its speed.",
  offered: (model) => model.tasks.includes("generate") && model.has_chat_template,
  fields: (model) => [
    { name: "message", label: "Message", hint: "Shift Enter starts a new line", kind: "text", rows: 4, param: "messages",
      value: "In two sentences: how does a hydroelectric power station work?" },
    ...(model.reads_images ? [{ name: "images", label: "Images", hint: "choose or drop files", kind: "images", param: "images" }] : []),
    { name: "system", label: "System message", kind: "text", rows: 2, option: true, wide: true, param: "system" },
    ...SAMPLING,
  ],
  request(values, model, state) {
    if (!values.message.trim()) throw new Refused("Write a message.", { param: "messages" });
    const body = { model: model.id, messages: messagesOf(values, model, state.turns ?? []) };
    return { path: "/v1/chat/completions", body: withSampling(body, values) };
  },
  async run({ model, values, request, signal, state, slot }) {
    const turns = (state.turns ??= []), user = values.message.trim(), images = values.images ?? [];
    let turn = turns.find((each) => each === state.open);
    if (!turn) turns.push((turn = state.open = { user, images, replies: {} }));
    const past = turns.filter((each) => each !== turn && model.id in each.replies)
      .flatMap((each) => [bubble("user", each.user, each.images), bubble("assistant", each.replies[model.id])]);
    const reply = bubble("assistant", ""), facts = el("p", { class: "aside facts" });
    slot.replaceChildren(...past, bubble("user", user, images), reply, facts);
    try {
      const { text, said } = await write(request, signal, reply.querySelector(".text"), facts, (choice) => choice.delta?.content);
      turn.replies[model.id] = text;
      return { nodes: [...slot.childNodes], said };
    } catch (error) {
      const written = reply.querySelector(".text").textContent;
      if (error.name !== "AbortError" || !written) slot.replaceChildren(...past);
      else turn.replies[model.id] = written;  // stopped: what has come is kept
      throw error;
    }
  },
  /** The message stays in the form if nobody has answered it. */
  afterRun(panel) {
    const { state } = panel, turn = state.open;
    state.open = null;
    if (!turn) return;
    if (Object.keys(turn.replies).length) {
      panel.field("message").value = "";
      panel.picker("images")?.set([]);
    }
    else state.turns.splice(state.turns.indexOf(turn), 1);
  },
};

export const complete = {
  id: "complete", title: "Complete", action: "Complete", heading: "Continue a text",
  about: "The model goes on where the text ends.",
  empty: "Press Complete to see how the text goes on.",
  offered: (model) => model.tasks.includes("generate"),
  fields: () => [{ name: "prompt", label: "Text", kind: "text", rows: 5, value: "A penstock is a pipe that" }, ...SAMPLING],
  request(values, model) {
    if (!values.prompt) throw new Refused("Give a text to continue.", { param: "prompt" });
    return { path: "/v1/completions", body: withSampling({ model: model.id, prompt: values.prompt }, values) };
  },
  async run({ values, request, signal, slot }) {
    const written = el("span", { class: "written" }), facts = el("p", { class: "aside facts" });
    const text = el("section", { class: "card" }, el("p", { class: "completion" }, el("span", { class: "given" }, values.prompt), written), facts);
    slot.replaceChildren(text);
    const { said } = await write(request, signal, written, facts, (choice) => choice.text);
    return { nodes: [text], said };
  },
};
