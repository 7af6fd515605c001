// The models: how they are, and what an operator does with them. One model has a page of its own.

import { carryOut, changeButton } from "../actions.js";
import { inPath } from "../api.js";
import { el } from "../dom.js";
import { number, plural } from "../format.js";
import { note, tokensPerSecond } from "../history.js";
import { badge, field, heading, section, table, valuesOf } from "../parts.js";
import { showModel } from "../model.js";
import { presenceButtons } from "../presence.js";

export const title = "Models";
export const paths = { state: "state" };

export function show({ state }, redraw, name) {
  note(state);
  if (name) return showModel(state, name);
  return [
    heading(
      "Models",
      `${plural(state.models.length, "model")}, ${plural(state.aliases.length, "alias", "aliases")}`,
    ),
    table({
      columns: [
        [
          "model",
          (model) => el("a", { href: `#/models/${encodeURIComponent(model.name)}` }, model.name),
        ],
        [
          "status",
          (model) => [
            badge(model.status),
            model.message && el("small", { class: "block" }, model.message),
          ],
        ],
        [
          "replicas",
          (model) => `${model.replicas.length} of ${model.target_replicas}`,
          { number: true },
        ],
        ["running", (model) => number(loadOf(model, "running")), { number: true }],
        ["waiting", (model) => number(loadOf(model, "waiting")), { number: true }],
        [
          "tokens/s",
          (model) => number(tokensPerSecond(model.replicas.map((each) => each.id))),
          { number: true },
        ],
        ["", (model) => el("div", { class: "buttons" }, presenceButtons(model))],
      ],
      rows: state.models,
      keyOf: (model) => model.name,
    }),
    aliases(state),
    loadForm(),
  ];
}

function loadOf(model, name) {
  return model.replicas.reduce((total, replica) => total + (replica.load?.[name] ?? 0), 0);
}

function aliases(state) {
  return section(
    "Aliases",
    table({
      columns: [
        ["alias", (alias) => alias.name],
        ["models by weight", (alias) => shares(alias.models)],
        ["keeps its model by", (alias) => alias.sticky ?? "nothing"],
        [
          "",
          (alias) =>
            changeButton("Delete", () => [`aliases/${inPath(alias.name)}`, { method: "DELETE" }], {
              label: `Delete the alias ${alias.name}`,
              confirm: `Delete the alias ${alias.name}? Requests for it that run go on.`,
            }),
        ],
      ],
      rows: state.aliases,
      keyOf: (alias) => alias.name,
      empty: "No name stands for other models.",
    }),
    el(
      "details",
      {},
      el("summary", {}, "Make or change an alias"),
      el(
        "form",
        { class: "row", onsubmit: putAlias },
        field("Alias", el("input", { name: "name", required: true })),
        field(
          "Models and weights",
          el("input", { name: "weights", required: true, placeholder: "stable=95, canary=5" }),
        ),
        el("button", { type: "submit", class: "primary" }, "Save"),
      ),
    ),
  );
}

function shares(weights) {
  const all = Object.values(weights).reduce((sum, weight) => sum + weight, 0);
  return Object.entries(weights)
    .map(([model, weight]) => `${model} ${number((100 * weight) / all, 1)} %`)
    .join(", ");
}

function putAlias(event) {
  const { name, weights } = valuesOf(event);
  const pairs = weights.split(",").map((each) => each.trim().split(/\s*=\s*/));
  const body = Object.fromEntries(pairs.map(([model, weight]) => [model, Number(weight ?? 1)]));
  void carryOut(
    [`aliases/${inPath(name)}`, { method: "PUT", body }],
    `${name} stands for ${weights}.`,
  );
}

function loadForm() {
  return section(
    "Load another model",
    el(
      "details",
      {},
      el("summary", {}, "Name and source"),
      el(
        "form",
        { class: "column", onsubmit: loadModel },
        field("Name", el("input", { name: "name", required: true })),
        field(
          "Source",
          el("input", { name: "source", required: true }),
          "demo, a folder on the machine, or a hub id",
        ),
        field(
          "Further fields, as JSON",
          el("textarea", {
            name: "more",
            rows: 3,
            spellcheck: "false",
            placeholder: '{"engine": {"max_model_len": 4096}}',
          }),
          "As loomserve config describe lists them; left out: the platform decides",
        ),
        el("button", { type: "submit", class: "primary" }, "Load"),
      ),
    ),
  );
}

function loadModel(event) {
  const area = event.currentTarget.elements.more;
  const { more = "{}", ...body } = valuesOf(event);
  try {
    Object.assign(body, JSON.parse(more));
    area.setCustomValidity("");
  } catch {
    area.setCustomValidity("This is no JSON.");
    area.reportValidity();
    area.oninput = () => area.setCustomValidity("");
    return;
  }
  void carryOut(["models", { method: "POST", body }], `${body.name} is loaded.`);
}
