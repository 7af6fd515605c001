// Who has an API key, what it may do, and what was used.

import { ApiError, ask } from "../api.js";
import { el } from "../dom.js";
import { moment, number, seconds } from "../format.js";
import { occasionally } from "../occasionally.js";
import { badge, heading, notice, section, table } from "../parts.js";

export const title = "Keys and usage";
export const paths = { keys: "keys" };

// Not every platform counts it.
const usage = occasionally(() => ask("usage?by=key,model"), 30_000);

export function show({ keys }, redraw) {
  const sums = usage(redraw);
  return [
    heading(
      "Keys and usage",
      "Keys are made and revoked by loomserve key, on the machine; nothing here shows one.",
    ),
    keys instanceof ApiError ? notice(keys.message) : known(keys),
    sums && used(sums),
  ];
}

function known({ asked_for: askedFor, problem, keys }) {
  return [
    problem && notice(problem, "bad"),
    !askedFor && notice("No key is asked for: whoever reaches this server may use its models."),
    askedFor &&
      table({
        columns: [
          ["key", (key) => key.name],
          ["expires", expiry],
          ["models", (key) => key.models.join(", ") || "all"],
          ["requests a minute", (key) => limit(key.requests_per_minute), { number: true }],
          ["at once", (key) => limit(key.max_concurrent), { number: true }],
          ["tokens a minute", (key) => limit(key.tokens_per_minute), { number: true }],
          ["tokens a day", (key) => limit(key.tokens_per_day), { number: true }],
          ["late requests", (key) => (key.refuse_late ? "refused" : "served")],
        ],
        rows: keys,
        keyOf: (key) => key.name,
        empty: "There is no key, so nobody gets in.",
      }),
  ];
}

function limit(value) {
  return value === null ? "no limit" : number(value);
}

function expiry({ expires_at: at }) {
  if (at === null) return "never";
  const over = new Date(at) <= new Date();
  return [moment(new Date(at) / 1000), over ? " " : null, over && badge("expired")];
}

// By key and model, since the month began.
function used({ from, usage }) {
  return section(
    "Usage",
    el("p", { class: "about" }, `Of requests that ended since ${moment(new Date(from) / 1000)}.`),
    table({
      columns: [
        ["key", (sum) => sum.key || "without a key"],
        ["model", (sum) => sum.model],
        ["requests", (sum) => number(sum.requests), { number: true }],
        ["tokens of prompts", (sum) => number(sum.prompt_tokens), { number: true }],
        ["of them cached", (sum) => number(sum.cached_tokens), { number: true }],
        ["tokens of answers", (sum) => number(sum.completion_tokens), { number: true }],
        ["device time", (sum) => seconds(sum.device_seconds), { number: true }],
      ],
      rows: usage,
      keyOf: (sum) => `${sum.key} ${sum.model}`,
      empty: "No request has ended.",
    }),
  );
}
