// Plans over time: a line each, from when it was made until it ended, or until now.

import { el } from "./dom.js";
import { moment, seconds } from "./format.js";
import { kindOf } from "./parts.js";

const MOST = 12;

export function timeline(plans) {
  if (!plans.length) return null;
  const shown = plans.slice(0, MOST);
  const now = Date.now() / 1000;
  const begin = Math.min(...shown.map((plan) => plan.created));
  const span = Math.max(1, now - begin);
  const share = (at) => 100 * Math.min(1, Math.max(0, (at - begin) / span));
  return el(
    "ol",
    { class: "timeline", "aria-label": "Plans over time" },
    shown.map((plan) => line(plan, share(plan.created), share(plan.ended ?? now))),
    el(
      "li",
      { class: "times", "aria-hidden": "true", "data-key": "times" },
      el("span", {}, moment(begin)),
      el("span", {}, moment(begin + span / 2)),
      el("span", {}, "now"),
    ),
  );
}

// What took a second of a day is still seen.
function line({ id, created, ended, status }, from, to) {
  const width = Math.max(0.8, to - from);
  const lasted = ended === null ? "until now" : `for ${seconds(ended - created)}`;
  const told = `${status}, from ${moment(created)} ${lasted}`;
  return el(
    "li",
    { "data-key": id },
    el("a", { href: `#/plans/${encodeURIComponent(id)}` }, id),
    el(
      "svg",
      { viewBox: "0 0 100 8", preserveAspectRatio: "none", role: "img", "aria-label": told },
      el("rect", { class: "trough", y: 3.5, width: 100, height: 1 }),
      el("rect", { class: kindOf(status), x: Math.min(from, 100 - width), width, height: 8 }),
    ),
  );
}
