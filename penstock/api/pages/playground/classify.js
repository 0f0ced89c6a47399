// Labels for texts: the model's own, the caller's, and the values of reward models.

import { Refused } from "./client.js";
import { bars, timing } from "./charts.js";
import { card, commaSeparated, el, fixed, nonEmptyLines, percent, plural } from "./dom.js";
import { inputTexts, textFields } from "./embed.js";
import { inputNode, sampleImages } from "./images.js";

const MAX_LABELS = 8;  // of a text that are shown
const TEXTS = `I love how quiet the new pump is.
The delivery was late, and the box was damaged.
How many people live in Norway?
Please cancel my subscription.`;
const PREMISES = `A man is playing a guitar on stage.
The museum is closed on Mondays.`;
const HYPOTHESES = `Somebody makes music.
You can visit the museum every day.`;

function labelled(title, labels, scores, shown = percent) {
  const order = scores.map((_, i) => i).sort((a, b) => scores[b] - scores[a]);
  const most = Math.max(1e-9, ...scores.map(Math.abs)), isShare = scores.every((score) => score >= 0 && score <= 1);
  const rows = order.slice(0, MAX_LABELS).map((i, place) => ({
    name: labels[i], share: isShare ? scores[i] : Math.max(0, scores[i]) / most, shown: shown(scores[i]), strong: place === 0 }));
  const more = order.length - rows.length;
  return card(title, null, bars(rows), more > 0 ? el("p", { class: "aside" }, `and ${plural(more, "label")} more`) : null);
}

export const classify = {
  id: "classify", title: "Classify", action: "Classify", heading: "Classify",
  about: "The model's own labels, with the probability of each.",
  empty: "Press Classify to see the labels of each text.",
  offered: (model) => model.tasks.includes("classify") && model.labels.length > 1 && model.score_kind === null,
  fields: (model) => [
    ...(model.reads_pairs
      ? [{ name: "input", label: "Texts", hint: "one per line", kind: "lines", value: PREMISES, rows: 4 },
        { name: "second", label: "Statements about them", hint: "one for each text", kind: "lines", value: HYPOTHESES, rows: 4, param: "second" }]
      : [{ name: "input", label: "Texts", hint: "one per line", kind: "lines", value: TEXTS, rows: 7 }]),
    { name: "raw", label: "show logits, not probabilities", kind: "check", option: true, param: "use_activation" },
    { name: "truncate", label: "Texts that are too long", kind: "select", option: true, param: "truncate_prompt_tokens",
      options: [["refuse", "are refused"], ["limit", "are cut at the model's limit"]] },
  ],
  request(values, model) {
    let input = inputTexts(values);
    if (values.second !== undefined) {
      const second = nonEmptyLines(values.second);
      if (second.length !== input.length) throw new Refused(`Give a statement for each text: ${input.length}, not ${second.length}.`, { param: "second" });
      input = input.map((text, i) => [text, second[i]]);
    }
    const body = { input };
    if (values.raw) body.use_activation = false;
    return { path: "/classify", body: textFields(body, values, model) };
  },
  show(result, { request, model }) {
    const shown = request.body.use_activation === false ? (value) => fixed(value, 3) : percent;
    const titles = request.body.input.map((text) => (Array.isArray(text) ? text.join(" → ") : text));
    const cards = result.answer.data.map(({ probs }, i) => labelled(titles[i], model.labels, probs, shown));
    return { nodes: [timing(result, plural(result.answer.usage?.total_tokens ?? 0, "token")), ...cards], said: plural(cards.length, "text") };
  },
};

export const zeroShot = {
  id: "zero-shot", title: "Zero-shot", action: "Classify",
  wordsFor: ({ reads_images: images }) => ({ heading: "Your own labels", action: "Classify",
    about: `Name any labels; the model says how well each fits the ${images ? "image" : "text"}.` }),
  empty: "Press Classify to see how well your labels fit.",
  offered: (model) => model.zero_shot,
  fields: (model) => [
    ...(model.reads_images
      ? [{ name: "images", label: "Images", hint: "choose or drop files", kind: "images", param: "input", value: sampleImages() },
        { name: "labels", label: "Labels", hint: "separated by commas", kind: "line", value: "a red circle, a blue square, a green triangle" }]
      : [{ name: "input", label: "Texts", hint: "one per line", kind: "lines", rows: 4,
        value: "The new engine uses a third less fuel.\nThe home team scored in the last minute." },
      { name: "labels", label: "Labels", hint: "separated by commas", kind: "line", value: "technology, sport, politics, food" },
      { name: "multi_label", label: "several labels may fit", kind: "check", option: true }]),
    ...(model.reads_pairs ? [{ name: "hypothesis_template", label: "Sentence about a label", hint: "{} is the label", kind: "line",
      option: true, wide: true, placeholder: "This example is {}." }] : []),
  ],
  request(values, model) {
    const labels = commaSeparated(values.labels), images = values.images;
    if (images && !images.length) throw new Refused("Choose at least one image.", { param: "input" });
    const body = { model: model.id, input: images ? images.map(({ url }) => ({ image: url })) : inputTexts(values), labels };
    if (!labels.length) throw new Refused("Give at least one label.", { param: "labels" });
    if (values.multi_label) body.multi_label = true;
    if (values.hypothesis_template) body.hypothesis_template = values.hypothesis_template;
    return { path: "/v1/zero-shot", body };
  },
  show(result, { request }) {
    const cards = result.answer.data.map(({ labels, scores }, i) => labelled(inputNode(request.body.input[i]), labels, scores));
    const said = plural(cards.length, request.body.input.every((input) => input.image) ? "image" : "text");
    return { nodes: [timing(result, plural(result.answer.usage?.total_tokens ?? 0, "token")), ...cards], said };
  },
};

export const reward = {
  id: "reward", title: "Reward", action: "Judge", heading: "Judge answers",
  about: "A number for each text: higher is better. Of a model that judges steps, one number for each step.",
  empty: "Press Judge to see the values.",
  offered: (model) => model.tasks.includes("reward") && model.score_kind === null,
  fields: () => [{ name: "input", label: "Texts", hint: "one per line", kind: "lines", rows: 5,
    value: "What is 2 + 2? It is 4.\nWhat is 2 + 2? It is 5." }],
  request: (values, model) => ({ path: "/pooling", body: { model: model.id, task: "reward", input: inputTexts(values) } }),
  show(result, { request }) {
    const cards = result.answer.data.map(({ data }, i) => {
      const values = data.flat(), most = Math.max(1e-9, ...values.map(Math.abs));
      return card(request.body.input[i], null, bars(values.map((value, step) => ({
        name: values.length > 1 ? `step ${step + 1}` : "reward", share: Math.max(0, value) / most, shown: fixed(value, 3) }))));
    });
    return { nodes: [timing(result), ...cards], said: plural(cards.length, "text") };
  },
};
