// One model: its replicas, adapters, and all that can be done with it.

import { carryOut, changeButton } from "./actions.js";
import { inPath } from "./api.js";
import { el } from "./dom.js";
import { bytes, number, percent } from "./format.js";
import { pastRates, tokensPerSecond } from "./history.js";
import {
  badge,
  bar,
  facts,
  field,
  heading,
  notice,
  section,
  select,
  spark,
  table,
  valuesOf,
} from "./parts.js";
import { presenceButtons } from "./presence.js";

export function showModel(state, name) {
  const model = state.models.find((each) => each.name === name);
  if (!model) {
    return [
      heading(name),
      notice(`There is no model ${name} any more.`),
      el("a", { href: "#/models" }, "All models"),
    ];
  }
  const ids = model.replicas.map((replica) => replica.id);
  return [
    heading(name, null, badge(model.status), presenceButtons(model), removeButton(model)),
    model.message && notice(model.message),
    facts([
      ["source", model.source],
      ["context", model.max_model_len && `${number(model.max_model_len)} tokens`],
      ["devices", model.devices.join(", ") || "–"],
      ["routing", model.router],
      [
        "tokens/s",
        [
          number(tokensPerSecond(ids)),
          " ",
          spark(pastRates(ids), "Tokens a second over the last minutes"),
        ],
      ],
      model.placement ? ["why there", model.placement] : null,
      ...parsers(model.parsers),
    ]),
    el("p", {}, el("a", { href: `#/chat/${encodeURIComponent(name)}` }, "Try it")),
    replicas(model),
    scaling(model),
    adapters(model),
  ];
}

function parsers(chosen) {
  if (!chosen) return [];
  const { tool_call: toolCall, reasoning } = chosen;
  return [
    ["tool calls read by", `${toolCall.name ?? "none"} (${toolCall.why})`],
    ["reasoning read by", `${reasoning.name ?? "none"} (${reasoning.why})`],
  ];
}

function removeButton({ name, status }) {
  return status === "unloading"
    ? null
    : changeButton("Remove", () => [`models/${inPath(name)}`, { method: "DELETE" }], {
        label: `Remove ${name}`,
        kind: "danger",
        confirm: `Remove ${name} once its running requests have ended? Its name will not be known any more until somebody loads it or the platform starts again.`,
        done: `${name} ends once its requests have.`,
      });
}

function replicas(model) {
  return section(
    "Replicas",
    table({
      columns: [
        ["replica", (replica) => el("code", {}, replica.id)],
        [
          "device",
          (replica) =>
            replica.stages.length
              ? replica.stages.map((stage) => `${stage.device} (${stage.layers} layers)`).join(", ")
              : replica.device,
        ],
        [
          "state",
          (replica) => badge(replica.draining ? "draining" : replica.asleep ? "asleep" : "ready"),
        ],
        ["role", (replica) => roleSelect(replica)],
        ["running", (replica) => number(replica.load?.running), { number: true }],
        ["waiting", (replica) => number(replica.load?.waiting), { number: true }],
        [
          "KV",
          (replica) =>
            bar(
              replica.load?.kv_cache_usage,
              `KV memory of ${replica.id}`,
              percent(replica.load?.kv_cache_usage),
            ),
        ],
        ["preempted", preempted],
        ["", drainButton],
      ],
      rows: model.replicas,
      keyOf: (replica) => replica.id,
      empty:
        model.status === "unloaded"
          ? "It has no engine; a request for it loads one."
          : "No engine runs.",
    }),
  );
}

function preempted({ load }) {
  const of = load?.scheduling;
  if (!of) return "–";
  const swap = of.swap_capacity_bytes
    ? `, ${bytes(of.swap_used_bytes)} of ${bytes(of.swap_capacity_bytes)} of swap`
    : "";
  return `${number(of.swapped_out)} swapped, ${number(of.recomputed)} computed again${swap}`;
}

function roleSelect(replica) {
  return select("role", ["unified", "prefill", "decode"], replica.role, {
    "aria-label": `Role of ${replica.id}`,
    onchange: (event) =>
      carryOut(
        [
          `replicas/${inPath(replica.id)}/role`,
          { method: "PUT", body: { role: event.target.value } },
        ],
        `Its role is ${event.target.value}.`,
      ),
  });
}

function drainButton({ id, draining }) {
  return changeButton(
    draining ? "Give it work" : "Drain",
    () => [`replicas/${inPath(id)}/draining`, { method: "PUT", body: { draining: !draining } }],
    {
      label: draining ? `Give ${id} work` : `Drain ${id}`,
      confirm: !draining && "Have this replica finish what it has, and take nothing new?",
    },
  );
}

function scaling({ name, target_replicas: target, scaling: load }) {
  const path = `models/${inPath(name)}/replicas`;
  return section(
    "How many replicas",
    load &&
      el(
        "p",
        {},
        load.fixed
          ? `An operator has set ${target}; load has no say. `
          : `As many as its load asks for, ${load.min} to ${load.max}. `,
        load.why,
      ),
    el(
      "form",
      {
        class: "row",
        onsubmit: (event) => {
          const { replicas } = valuesOf(event);
          void carryOut(
            [path, { method: "PUT", body: { replicas: Number(replicas) } }],
            `${name} will have ${replicas}.`,
          );
        },
      },
      field(
        "Replicas",
        el("input", {
          name: "replicas",
          type: "number",
          min: 1,
          max: 1000,
          value: target,
          required: true,
        }),
      ),
      el("button", { type: "submit", class: "primary" }, "Set"),
      load &&
        changeButton("Leave it to the load", () => [
          path,
          { method: "PUT", body: { replicas: "auto" } },
        ]),
    ),
  );
}

function adapters(model) {
  const path = `models/${inPath(model.name)}/adapters`;
  return section(
    "LoRA adapters",
    table({
      columns: [
        ["adapter", (adapter) => adapter.name],
        ["source", (adapter) => adapter.source],
        ["rank", (adapter) => number(adapter.rank), { number: true }],
        [
          "replicas that have it",
          (adapter) => `${adapter.replicas.length} of ${model.replicas.length}`,
          { number: true },
        ],
        ["", (adapter) => adapter.message],
        [
          "",
          (adapter) =>
            changeButton(
              "Unload",
              () => [`${path}/${inPath(adapter.name)}`, { method: "DELETE" }],
              {
                label: `Unload the adapter ${adapter.name}`,
                confirm: `Unload the adapter ${adapter.name}? Requests for it that run go on.`,
              },
            ),
        ],
      ],
      rows: model.adapters,
      keyOf: (adapter) => adapter.name,
      empty: "It has none.",
    }),
    el(
      "details",
      {},
      el("summary", {}, "Load an adapter"),
      el(
        "form",
        {
          class: "row",
          onsubmit: (event) => {
            const { name, source } = valuesOf(event);
            void carryOut(
              [`${path}/${inPath(name)}`, { method: "PUT", body: { source } }],
              `${name} can be asked for.`,
            );
          },
        },
        field("Name", el("input", { name: "name", required: true })),
        field(
          "Source",
          el("input", { name: "source", required: true }),
          "A PEFT folder, or a hub id",
        ),
        el("button", { type: "submit", class: "primary" }, "Load"),
      ),
    ),
  );
}
