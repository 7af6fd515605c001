// An operator's own action, of which a plan is made.

import { el } from "./dom.js";
import { field, select, valuesOf } from "./parts.js";

const KINDS = {
  move_requests: { label: "requests to another replica", fields: ["engine", "to", "requests"] },
  move: {
    label: "KV, heads or layers to a lender, or home",
    fields: ["kind", "engine", "lender", "amount", "back"],
  },
  set_role: { label: "another role", fields: ["engine", "role"] },
  add_replica: { label: "one more replica", fields: ["model", "device"] },
  remove_replica: { label: "one replica fewer", fields: ["engine"] },
};
let chosen = "move_requests";

// `propose` gets the body of a request for a plan.
export function actionForm(state, propose, redraw) {
  const engines = state.models.flatMap((model) =>
    model.replicas.map((replica) => [
      replica.id,
      `${model.name} on ${replica.device} (${replica.id})`,
    ]),
  );
  const controls = {
    kind: () =>
      field(
        "What",
        select("kind", [
          ["requests", "KV of requests, in bytes"],
          ["heads", "KV heads"],
          ["layers", "layers"],
        ]),
      ),
    engine: () => field("Replica", select("engine", engines)),
    to: () => field("To", select("to", engines)),
    lender: () => field("Lender", select("lender", engines)),
    requests: () =>
      field(
        "How many",
        el("input", { name: "requests", type: "number", min: 1, value: 1, required: true }),
      ),
    amount: () =>
      field(
        "How much",
        el("input", { name: "amount", type: "number", min: 1, value: 1, required: true }),
      ),
    back: () => check("back", "Home again"),
    role: () => field("Role", select("role", ["unified", "prefill", "decode"])),
    model: () =>
      field(
        "Model",
        select(
          "model",
          state.models.map((model) => model.name),
        ),
      ),
    device: () =>
      field(
        "Device",
        select(
          "device",
          state.devices.map((device) => device.name),
        ),
      ),
  };
  return el(
    "details",
    {},
    el("summary", {}, "An action of your own"),
    el(
      "form",
      { class: "row", onsubmit: (event) => propose(bodyOf(event)) },
      field(
        "Action",
        select(
          "action",
          Object.entries(KINDS).map(([name, { label }]) => [name, label]),
          chosen,
          {
            onchange: (event) => {
              chosen = event.target.value;
              redraw();
            },
          },
        ),
      ),
      KINDS[chosen].fields.map((name) =>
        el("div", { "data-key": `${chosen} ${name}` }, controls[name]()),
      ),
      check("force", "Limits may be exceeded"),
      el("button", { type: "submit", class: "primary" }, "Propose"),
    ),
  );
}

function check(name, text) {
  return el("label", { class: "check" }, el("input", { type: "checkbox", name }), text);
}

function bodyOf(event) {
  const { force, ...action } = valuesOf(event);
  for (const name of ["requests", "amount"]) {
    if (name in action) action[name] = Number(action[name]);
  }
  if (action.action === "move") action.back = "back" in action;
  return { actions: [action], force: force !== undefined };
}
