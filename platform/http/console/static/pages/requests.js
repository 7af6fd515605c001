// What waits and runs at this moment, and where.

import { el } from "../dom.js";
import { number, percent, plural, seconds } from "../format.js";
import { note, tokensPerSecond } from "../history.js";
import { bar, heading, table } from "../parts.js";

export const title = "Requests";
export const paths = { state: "state" };

export function show({ state }) {
  note(state);
  const rows = state.models.flatMap((model) => model.replicas.map((replica) => ({ ...replica, model: model.name })));
  const of = (name) => rows.reduce((total, row) => total + (row.load?.[name] ?? 0), 0);
  return [
    heading("Requests", `${plural(of("running"), "request")} running, ${number(of("waiting"))} waiting in engines`),
    table({
      columns: [
        ["model", (row) => el("a", { href: `#/models/${encodeURIComponent(row.model)}` }, row.model)],
        ["device", (row) => row.device],
        ["open at gateways", (row) => number(row.in_flight), { number: true }],
        ["running", (row) => number(row.load?.running), { number: true }],
        ["waiting", (row) => number(row.load?.waiting), { number: true }],
        ["oldest waits", (row) => (row.load?.waiting ? seconds(row.load.oldest_waiting_s) : "–"), { number: true }],
        ["KV", (row) => bar(row.load?.kv_cache_usage, `KV memory of ${row.model} on ${row.device}`, percent(row.load?.kv_cache_usage))],
        ["tokens/s", (row) => number(tokensPerSecond([row.id])), { number: true }],
        ["between tokens", (row) => seconds(row.load?.pace?.output_token_s), { number: true }],
        ["a request", (row) => seconds(row.load?.pace?.request_s), { number: true }],
        ["taken since start", (row) => number(row.load?.requests), { number: true }],
      ],
      rows,
      keyOf: (row) => row.id,
      empty: "No engine runs.",
    }),
    el("p", { class: "about" }, "Times between tokens and of a request are means over those that ended lately. Requests for a model that is not there yet wait at the gateways, and are not in this table."),
  ];
}
