// A chat with any model, with what its answer took.

import { ApiError, randomHex, session, stream } from "../api.js";
import { el } from "../dom.js";
import { number, seconds } from "../format.js";
import { field, heading, notice, select, valuesOf } from "../parts.js";

export const title = "Chat";
export const paths = { state: "state", tracing: "tracing" };

// What was said in this tab, and the answer that is under way.
let turns = [];
let stopping = null;

export function show({ state, tracing }, redraw, asked) {
  const names = namesOf(state);
  return [
    heading("Chat", "With a model as clients see it, over the OpenAI API."),
    el(
      "div",
      {
        class: "talk",
        role: "log",
        "aria-label": "Conversation",
        "aria-busy": stopping ? "true" : "false",
      },
      turns.map((said) => turn(said, tracing)),
    ),
    el(
      "form",
      { class: "column chat", onsubmit: (event) => send(event, redraw, tracing.enabled) },
      el(
        "div",
        { class: "row" },
        field("Model", select("model", names, names.includes(asked) ? asked : names[0])),
        field(
          "API key",
          el("input", {
            name: "key",
            type: "password",
            autocomplete: "off",
            value: session.apiKey,
          }),
          "Only if the platform asks for keys; kept like the token",
        ),
      ),
      field(
        "Message",
        el("textarea", { name: "text", rows: 3, required: true, onkeydown: sendOnEnter }),
        "Enter sends, Shift and Enter begin a line",
      ),
      el(
        "div",
        { class: "buttons" },
        stopping
          ? el(
              "button",
              {
                type: "button",
                class: "danger",
                "data-key": "stop",
                onclick: () => stopping?.abort(),
              },
              "Stop",
            )
          : el("button", { type: "submit", class: "primary", "data-key": "send" }, "Send"),
        turns.length > 0 &&
          !stopping &&
          el(
            "button",
            {
              type: "button",
              class: "plain",
              onclick: () => {
                turns = [];
                redraw();
              },
            },
            "Begin anew",
          ),
      ),
      el(
        "details",
        {},
        el("summary", {}, "How it answers"),
        el(
          "div",
          { class: "row" },
          field(
            "Most tokens",
            el("input", { name: "max_tokens", type: "number", min: 1, value: 200 }),
          ),
          field(
            "Temperature",
            el("input", {
              name: "temperature",
              type: "number",
              min: 0,
              max: 2,
              step: 0.1,
              value: 0.7,
            }),
          ),
        ),
        field("System message", el("textarea", { name: "system", rows: 2 })),
      ),
    ),
  ];
}

// Whether a model answers chats, only it can say.
function namesOf(state) {
  return [
    ...state.models
      .filter((model) => model.status !== "unloading")
      .flatMap((model) => [model.name, ...model.adapters.map((each) => each.name)]),
    ...state.aliases.map((alias) => alias.name),
  ];
}

function turn(said, tracing) {
  return el(
    "article",
    { class: `turn ${said.role}`, "aria-label": said.role === "user" ? "You" : said.model },
    el("h2", {}, said.role === "user" ? "You" : said.model),
    el("p", { class: "said" }, said.content || (said.done ? "" : "…")),
    said.error && notice(said.error, "bad"),
    said.done && said.role === "assistant"
      ? el("p", { class: "about" }, took(said), traceOf(said, tracing))
      : null,
  );
}

// Where its time went, in the words of the collector.
function traceOf({ traceId }, { trace_url: url }) {
  if (!traceId) return null;
  if (!url) return ` · trace ${traceId}`;
  const href = url.replaceAll("{trace_id}", traceId);
  return [" · ", el("a", { href, target: "_blank", rel: "noopener noreferrer" }, "its trace")];
}

function took({ firstS, wholeS, usage, stopped }) {
  const tokens = usage?.completion_tokens;
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  const rate = tokens > 1 && wholeS > firstS ? (tokens - 1) / (wholeS - firstS) : null;
  return [
    firstS && `first token after ${seconds(firstS)}`,
    rate && `${number(rate, 1)} tokens/s`,
    usage &&
      `${number(usage.prompt_tokens)} tokens of prompt${cached ? `, ${number(cached)} of them cached` : ""}, ${number(tokens)} of answer`,
    stopped && "stopped",
  ]
    .filter(Boolean)
    .join(" · ");
}

function sendOnEnter(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!stopping) event.currentTarget.form.requestSubmit();
}

async function send(event, redraw, traced) {
  const form = event.currentTarget;
  const given = valuesOf(event);
  if (!given.text || stopping) return;
  form.elements.text.value = "";
  session.apiKey = given.key ?? "";
  turns.push({ role: "user", content: given.text });
  const messages = turns
    .filter((each) => each.content)
    .map(({ role, content }) => ({ role, content }));
  if (given.system) messages.unshift({ role: "system", content: given.system });
  const traceId = traced ? randomHex(16) : null;
  const answer = { role: "assistant", model: given.model, content: "", done: false, traceId };
  turns.push(answer);
  stopping = new AbortController();
  redraw();
  try {
    await take(answer, request(given, messages), redraw);
  } catch (error) {
    if (error.name === "AbortError") answer.stopped = true;
    else if (error instanceof ApiError) answer.error = explained(error);
    else answer.error = "The answer was cut off.";
  } finally {
    answer.done = true;
    stopping = null;
    redraw();
  }
}

function request({ model, max_tokens: most, temperature }, messages) {
  return {
    model,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    ...(most && { max_tokens: Number(most) }),
    ...(temperature && { temperature: Number(temperature) }),
  };
}

async function take(answer, body, redraw) {
  const began = performance.now();
  let drawn = false;
  for await (const event of stream(
    "chat/completions",
    body,
    stopping.signal,
    answer.traceId,
  )) {
    const text = event.choices?.[0]?.delta?.content ?? "";
    if (text) {
      answer.wholeS = (performance.now() - began) / 1000;
      answer.firstS ??= answer.wholeS;
      answer.content += text;
    }
    if (event.usage) answer.usage = event.usage;
    if (drawn) continue;
    drawn = true;
    requestAnimationFrame(() => {
      drawn = false;
      redraw();
    });
  }
}

function explained(error) {
  return error.status === 401 ? `${error.message} Give one of its API keys.` : error.message;
}
