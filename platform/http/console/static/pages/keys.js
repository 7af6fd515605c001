// Who has an API key, what it may do, and what was used.

import { ApiError } from "../api.js";
import { el } from "../dom.js";
import { moment, number } from "../format.js";
import { badge, heading, notice, section, table } from "../parts.js";

export const title = "Keys and usage";
export const paths = { keys: "keys", usage: "usage" };

export function show({ keys, usage }) {
  return [
    heading(
      "Keys and usage",
      "Keys are made and revoked by loomserve key, on the machine; nothing here shows one.",
    ),
    keys instanceof ApiError ? notice(keys.message) : known(keys),
    usage instanceof ApiError ? null : section("Usage", told(usage)),
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

// Whatever the platform tells: lists of objects as tables, all else as names and values.
function told(value) {
  if (Array.isArray(value))
    return value.length && isRecord(value[0])
      ? records(value)
      : el("p", {}, value.map(plain).join(", ") || "Nothing yet.");
  if (!isRecord(value)) return el("p", {}, plain(value));
  const simple = Object.entries(value).filter(
    ([, each]) => typeof each !== "object" || each === null,
  );
  const nested = Object.entries(value).filter(
    ([, each]) => typeof each === "object" && each !== null,
  );
  return [
    simple.length ? records([Object.fromEntries(simple)]) : null,
    nested.map(([name, each]) => [el("h3", {}, words(name)), told(each)]),
  ];
}

function records(rows) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  const isNumber = (name) =>
    rows.every((row) => row[name] === null || typeof row[name] === "number");
  return table({
    columns: names.map((name) => [
      words(name),
      (row) => plain(row[name]),
      { number: isNumber(name) },
    ]),
    rows,
  });
}

function isRecord(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function words(name) {
  return name.replaceAll("_", " ");
}

function plain(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") return number(value, 3);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
