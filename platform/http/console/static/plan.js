// One plan: its steps, what each gains and costs, and what was not chosen and why.

import { ask, inPath } from "./api.js";
import { describe } from "./describe.js";
import { el } from "./dom.js";
import { bytes, moment, percent, seconds } from "./format.js";
import { badge, facts, heading, notice, section, table } from "./parts.js";
import { planButtons } from "./plan_buttons.js";

// The plan that is shown; it is asked for again with each drawing that follows new data.
let shown = { id: null, plan: null, problem: null, askedAt: 0 };

export function showPlan(id, redraw) {
  if (shown.id !== id) shown = { id, plan: null, problem: null, askedAt: 0 };
  void refresh(id, redraw);
  const { plan, problem } = shown;
  return [
    heading(
      id,
      plan && `Made ${moment(plan.created)} by the ${plan.origin}`,
      plan && badge(plan.status),
      plan && planButtons(plan),
    ),
    el("p", {}, el("a", { href: "#/plans" }, "All plans")),
    problem && notice(problem, "bad"),
    plan && contents(plan),
  ];
}

// What is not measured, or not fit to decide on.
export function missing({ subject, why }) {
  return `Missing: ${subject} (${why}).`;
}

// What a request for a plan has come to.
export function outcome({ plan, flaws = [], rejected = [] }) {
  return el(
    "div",
    { class: "card outcome" },
    plan
      ? [
          el(
            "h3",
            {},
            el("a", { href: `#/plans/${encodeURIComponent(plan.id)}` }, plan.id),
            " ",
            badge(plan.status),
          ),
          planButtons(plan),
          contents(plan),
        ]
      : [
          el("h3", {}, "Nothing would be moved"),
          flaws.map((flaw) => notice(missing(flaw))),
          whyNot(rejected),
        ],
  );
}

async function refresh(id, redraw) {
  const now = Date.now();
  if (now - shown.askedAt < 1000) return;
  shown.askedAt = now;
  let plan = null;
  let problem = null;
  try {
    plan = await ask(`plans/${inPath(id)}`);
  } catch (error) {
    problem = error.message;
  }
  if (shown.id !== id) return;
  shown = { ...shown, plan: plan ?? shown.plan, problem };
  redraw();
}

function contents(plan) {
  return [
    facts([
      ["gap between devices", percent(plan.spread, 1)],
      ["gain, predicted", percent(plan.predicted.gain, 1)],
      plan.real_gain === null ? null : ["gain, measured", percent(plan.real_gain, 1)],
      ["engines pause", seconds(plan.predicted.pause_s)],
      ["takes", seconds(plan.predicted.duration_s)],
      plan.forced ? ["forced", "limits may be exceeded"] : null,
    ]),
    section("Steps", steps(plan)),
    section("What was not chosen, and why", whyNot(plan.rejected)),
  ];
}

function steps(plan) {
  return table({
    columns: [
      ["what", (step) => describe(step.action)],
      ["from", (step) => step.source],
      ["to", (step) => step.target],
      [
        "status",
        (step) => [
          badge(step.status),
          step.message && el("small", { class: "block" }, step.message),
        ],
      ],
      ["gain", (step) => both(step, "gain", (value) => percent(value, 1)), { number: true }],
      ["cost", (step) => both(step, "cost_s", seconds), { number: true }],
      ["pause", (step) => both(step, "pause_s", seconds), { number: true }],
      ["moved", (step) => (step.moved_bytes ? bytes(step.moved_bytes) : "–"), { number: true }],
    ],
    rows: plan.steps.map((step, at) => ({ ...step, at })),
    keyOf: (step) => step.at,
  });
}

// As predicted, and as it really was.
function both({ predicted, real }, name, shown_as) {
  return real
    ? `${shown_as(predicted[name])}, really ${shown_as(real[name])}`
    : shown_as(predicted[name]);
}

function whyNot(rejected) {
  return table({
    columns: [
      ["what", (each) => describe(each.action)],
      ["from", (each) => each.source],
      ["to", (each) => each.target],
      ["reason", (each) => badge(each.reason.replaceAll("_", " "), "plain")],
      ["why", (each) => each.detail],
    ],
    rows: rejected.map((each, at) => ({ ...each, at })),
    keyOf: (each) => each.at,
    empty: "There was nothing else to choose.",
  });
}
