// Rebalancing: loads of devices, plans, why they are what they are, and why all else is not done.

import { carryOut, changeButton } from "../actions.js";
import { ApiError } from "../api.js";
import { describe } from "../describe.js";
import { el } from "../dom.js";
import { moment, number, percent } from "../format.js";
import { badge, bar, field, heading, notice, section, select, table } from "../parts.js";
import { actionForm } from "../action_form.js";
import { missing, outcome, showPlan } from "../plan.js";
import { planButtons } from "../plan_buttons.js";
import { timeline } from "../timeline.js";

export const title = "Plans";
export const paths = { state: "state", rebalancing: "rebalancing", plans: "plans" };

let made = null;

export function show(data, redraw, id) {
  const { state, rebalancing, plans } = data;
  if (rebalancing instanceof ApiError) return [heading("Plans"), notice(rebalancing.message)];
  if (id) return showPlan(id, redraw);
  return [
    heading(
      "Plans",
      "Moving work from hot devices to cold ones.",
      modeSelect(rebalancing),
      pauseButton(rebalancing),
    ),
    rebalancing.problem && notice(rebalancing.problem, "bad"),
    loads(rebalancing),
    proposing(state, plans, redraw),
    history(plans),
    counts(rebalancing),
  ];
}

function modeSelect({ mode }) {
  return field(
    "Mode",
    select(
      "mode",
      [
        ["off", "off: no plans"],
        ["advise", "advise: a person applies them"],
        ["auto", "auto: it applies them"],
      ],
      mode,
      {
        onchange: (event) =>
          carryOut(
            ["rebalancing", { method: "PUT", body: { mode: event.target.value } }],
            `The mode is ${event.target.value}.`,
          ),
      },
    ),
  );
}

function pauseButton({ paused }) {
  return changeButton(
    paused ? "Go on" : "Pause",
    () => ["rebalancing", { method: "PUT", body: { paused: !paused } }],
    {
      label: paused ? "Let actions begin again" : "Begin no action until told otherwise",
      done: paused ? "Actions may begin." : "No action begins until you go on.",
      kind: paused ? "primary" : "plain",
    },
  );
}

function loads({ devices, flaws, paused, running }) {
  return section(
    "Loads of devices",
    paused && notice("It is paused: no action begins."),
    running && el("p", {}, "Under way: ", planLink(running)),
    flaws.length ? notice(`No plan can be made just now. ${flaws.map(missing).join(" ")}`) : null,
    table({
      columns: [
        ["device", (device) => device.device],
        ["level", (device) => badge(device.level)],
        [
          "compute asked for",
          (device) => bar(device.compute, `Compute of ${device.device}`, percent(device.compute)),
        ],
        [
          "memory",
          (device) => bar(device.memory, `Memory of ${device.device}`, percent(device.memory)),
        ],
      ],
      rows: devices,
      keyOf: (device) => device.device,
      empty: "Nothing is shown while something is not measured.",
    }),
  );
}

function planLink(id) {
  return el("a", { href: `#/plans/${encodeURIComponent(id)}` }, id);
}

function proposing(state, plans, redraw) {
  const propose = async (body) => {
    made = await carryOut(["plans", { method: "POST", body, timeoutMs: 60_000 }], (answer) =>
      answer.plan
        ? `${answer.plan.id} is proposed; nothing moves before it is applied.`
        : "Nothing would be moved.",
    );
    redraw();
  };
  return section(
    "Make a plan",
    el(
      "div",
      { class: "buttons" },
      el(
        "button",
        { type: "button", class: "primary", onclick: () => propose({}) },
        "What would move now?",
      ),
    ),
    actionForm(state, propose, redraw),
    made && outcome(asItIs(made, plans)),
  );
}

// A plan that was made may have been applied since.
function asItIs(answer, { plans = [] }) {
  const known = plans.find((plan) => plan.id === answer.plan?.id);
  return known ? { ...answer, plan: { ...answer.plan, status: known.status } } : answer;
}

function history(plans) {
  if (plans instanceof ApiError) return notice(plans.message);
  return section(
    "The latest plans",
    timeline(plans.plans),
    table({
      columns: [
        ["plan", (plan) => planLink(plan.id)],
        ["made", (plan) => moment(plan.created)],
        ["by", (plan) => plan.origin],
        ["status", (plan) => badge(plan.status)],
        [
          "what",
          (plan) => plan.actions.map((action) => el("span", { class: "block" }, describe(action))),
        ],
        ["gain, predicted", (plan) => percent(plan.predicted.gain, 1), { number: true }],
        ["real", (plan) => percent(plan.real_gain, 1), { number: true }],
        ["", planButtons],
      ],
      rows: plans.plans,
      keyOf: (plan) => plan.id,
      empty: "There is none yet.",
    }),
  );
}

function counts({ rejected, actions }) {
  if (!Object.keys(rejected).length && !actions.length) return null;
  return section(
    "Since the controller started",
    table({
      caption: "Actions that ended",
      columns: [
        ["kind", (each) => each.kind],
        ["outcome", (each) => badge(each.outcome)],
        ["how many", (each) => number(each.count), { number: true }],
      ],
      rows: actions,
      keyOf: (each) => `${each.kind} ${each.outcome}`,
      empty: "No action has ended.",
    }),
    table({
      caption: "Candidates that were not chosen",
      columns: [
        ["reason", ([reason]) => reason.replaceAll("_", " ")],
        ["how many", ([, count]) => number(count), { number: true }],
      ],
      rows: Object.entries(rejected),
      keyOf: ([reason]) => reason,
      empty: "No candidate was looked at.",
    }),
  );
}
