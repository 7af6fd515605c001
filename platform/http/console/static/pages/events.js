// What happened: to models, and by rebalancing; the newest first.

import { ApiError } from "../api.js";
import { el } from "../dom.js";
import { moment } from "../format.js";
import { describe } from "../describe.js";
import { badge, field, heading, notice, table } from "../parts.js";

export const title = "Events";
export const paths = { models: "events?limit=200", rebalancing: "rebalancing/events?limit=200" };

let wanted = "";

export function show({ models, rebalancing }, redraw) {
  const all = [...ofModels(models), ...ofRebalancing(rebalancing)].sort(
    (one, other) => other.at - one.at,
  );
  const rows = all.filter((event) =>
    `${event.about} ${event.what} ${event.why}`.toLowerCase().includes(wanted.toLowerCase()),
  );
  const problems = [models, rebalancing].filter((each) => each instanceof ApiError);
  return [
    heading("Events", "Since the controller started; of rebalancing, as many as are kept."),
    problems.map((problem) => notice(problem.message)),
    field(
      "Only those with",
      el("input", {
        type: "search",
        oninput: (event) => {
          wanted = event.target.value;
          redraw();
        },
      }),
    ),
    table({
      columns: [
        [
          "when",
          (event) =>
            el("time", { datetime: new Date(1000 * event.at).toISOString() }, moment(event.at)),
        ],
        ["of", (event) => event.about],
        ["what", (event) => badge(event.what)],
        ["why", (event) => event.why],
      ],
      rows,
      keyOf: (event) => `${event.at} ${event.about} ${event.what} ${event.why}`,
      empty: wanted ? "No event has this in it." : "Nothing has happened yet.",
    }),
  ];
}

function ofModels(told) {
  if (told instanceof ApiError) return [];
  return told.events.map((event) => ({
    at: event.at,
    about: event.model,
    what: event.presence,
    why: event.why,
  }));
}

function ofRebalancing(told) {
  if (told instanceof ApiError) return [];
  return told.events.map((event) => ({
    at: event.at,
    about: event.plan ?? "rebalancing",
    what: event.kind,
    why: [event.action && describe(event.action), event.message].filter(Boolean).join(": "),
  }));
}
