// What waits and runs at this moment, and where.

import { el } from "../dom.js";
import { number, percent, plural, seconds } from "../format.js";
import { note, tokensPerSecond } from "../history.js";
import { badge, bar, heading, section, table } from "../parts.js";
import { queues } from "../queues.js";

export const title = "Requests";
export const paths = { state: "state" };

export function show({ state }, redraw) {
  note(state);
  const rows = state.models.flatMap((model) =>
    model.replicas.map((replica) => ({ ...replica, model: model.name })),
  );
  const of = (name) => rows.reduce((total, row) => total + (row.load?.[name] ?? 0), 0);
  return [
    heading(
      "Requests",
      `${plural(of("running"), "request")} running, ${number(of("waiting"))} waiting in engines`,
    ),
    section("In engines", inEngines(rows)),
    section("At gateways", atGateways(state, queues(redraw))),
  ];
}

function inEngines(rows) {
  return table({
    columns: [
      ["model", (row) => el("a", { href: `#/models/${encodeURIComponent(row.model)}` }, row.model)],
      ["device", (row) => row.device],
      ["running", (row) => number(row.load?.running), { number: true }],
      ["waiting", (row) => number(row.load?.waiting), { number: true }],
      [
        "oldest waits",
        (row) => (row.load?.waiting ? seconds(row.load.oldest_waiting_s) : "–"),
        { number: true },
      ],
      [
        "KV",
        (row) =>
          bar(
            row.load?.kv_cache_usage,
            `KV memory of ${row.model} on ${row.device}`,
            percent(row.load?.kv_cache_usage),
          ),
      ],
      ["tokens/s", (row) => number(tokensPerSecond([row.id])), { number: true }],
      ["between tokens", (row) => seconds(row.load?.pace?.output_token_s), { number: true }],
      ["a request", (row) => seconds(row.load?.pace?.request_s), { number: true }],
      ["taken since start", (row) => number(row.load?.requests), { number: true }],
    ],
    rows,
    keyOf: (row) => row.id,
    empty: "No engine runs.",
  });
}

function atGateways(state, waiting) {
  const rows = state.models.map((model) => ({
    ...model,
    open: model.replicas.reduce((total, replica) => total + replica.in_flight, 0),
    waits: waiting?.get(model.name) ?? (waiting ? 0 : null),
  }));
  return [
    table({
      columns: [
        ["model", (row) => row.name],
        ["status", (row) => badge(row.status)],
        ["open on replicas", (row) => number(row.open), { number: true }],
        ["waiting for a replica", (row) => number(row.waits), { number: true }],
      ],
      rows,
      keyOf: (row) => row.name,
    }),
    el(
      "p",
      { class: "about" },
      "Times between tokens and of a request are means over those that ended lately. What waits for a replica is asked for every ten seconds.",
    ),
  ];
}
