// Batches of all keys, and offline models.

import { changeButton } from "../actions.js";
import { ApiError, inPath } from "../api.js";
import { el } from "../dom.js";
import { moment, number, plural, seconds } from "../format.js";
import { badge, bar, facts, heading, notice, section, table } from "../parts.js";

export const title = "Batches";
export const paths = { lane: "batches" };

export function show({ lane }) {
  if (lane instanceof ApiError) return [heading("Batches"), notice(lane.message)];
  return [
    heading("Batches", `${plural(lane.batches.length, "batch", "batches")} under way`),
    facts([
      ...Object.entries(lane.by_status).map(([status, count]) => [
        status.replaceAll("_", " "),
        number(count),
      ]),
      ["lines answered", number(lane.answered_lines)],
      ["lines failed", number(lane.failed_lines)],
      ["tried again", number(lane.retries)],
    ]),
    table({
      columns: [
        [
          "batch",
          (batch) => [el("code", {}, batch.id), el("small", { class: "block" }, batch.endpoint)],
        ],
        ["key", (batch) => batch.api_key || "–"],
        [
          "status",
          (batch) => [badge(batch.status), batch.late && " ", batch.late && badge("late")],
        ],
        ["made", (batch) => moment(batch.created_at)],
        ["answered", progress],
        ["failed", (batch) => number(batch.failed), { number: true }],
        ["left", (batch) => seconds(batch.eta_s), { number: true }],
        [
          "",
          (batch) =>
            changeButton(
              "Cancel",
              () => [`batches/${inPath(batch.id)}/cancel`, { method: "POST" }],
              {
                label: `Cancel ${batch.id}`,
                kind: "danger",
                confirm: `Cancel ${batch.id}? What has been answered is kept.`,
              },
            ),
        ],
      ],
      rows: lane.batches,
      keyOf: (batch) => batch.id,
      empty: "No batch is under way.",
    }),
    offline(lane.offline_models),
  ];
}

function progress({ id, total, completed, failed, in_flight: flying }) {
  if (!total) return "–";
  const ended = completed + failed;
  const now = flying ? el("small", { class: "block" }, `${number(flying)} in engines now`) : null;
  return [bar(ended / total, `Progress of ${id}`, `${number(ended)} of ${number(total)}`), now];
}

function offline(models) {
  if (!models.length) return null;
  return section(
    "Offline models",
    table({
      columns: [
        ["model", (model) => model.name],
        [
          "state",
          (model) => [
            badge(model.ready ? "ready" : "loading"),
            model.problem && el("small", { class: "block" }, model.problem),
          ],
        ],
        ["static batches", (model) => number(model.batches), { number: true }],
        ["split for want of memory", (model) => number(model.splits), { number: true }],
      ],
      rows: models,
      keyOf: (model) => model.name,
    }),
  );
}
