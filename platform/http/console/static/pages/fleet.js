// Devices, the engines on them, and what they lend each other.

import { changeButton } from "../actions.js";
import { ApiError, inPath } from "../api.js";
import { el } from "../dom.js";
import { bytes, number, percent, plural, seconds } from "../format.js";
import { note, pastRates, tokensPerSecond } from "../history.js";
import { badge, bar, empty, facts, heading, notice, section, spark, table } from "../parts.js";
import { weave } from "../weave.js";

export const title = "Fleet";
export const paths = { state: "state", lending: "lending" };

export function show({ state, lending }) {
  note(state);
  const engines = enginesOf(state);
  return [
    heading(
      "Fleet",
      `${plural(state.devices.length, "device")}, ${plural(engines.length, "engine")}, up for ${seconds(state.uptime_s)}`,
    ),
    totals(engines),
    unwell(state),
    state.nodes.length > 1 || state.nodes.some((node) => node.status !== "up")
      ? nodes(state)
      : null,
    section(
      "Devices",
      el(
        "div",
        { class: "cards" },
        state.devices.map((device) => deviceCard(device, engines)),
      ),
    ),
    lending instanceof ApiError ? null : loans(state, lending),
    versions(state.versions),
  ];
}

// Each replica with its model; a pipeline is at its first device.
function enginesOf(state) {
  return state.models.flatMap((model) =>
    model.replicas.map((replica) => ({ ...replica, model: model.name })),
  );
}

function totals(engines) {
  const of = (field) => engines.reduce((total, engine) => total + (engine.load?.[field] ?? 0), 0);
  const ids = engines.map((engine) => engine.id);
  return el(
    "div",
    { class: "totals" },
    total("running", number(of("running"))),
    total("waiting", number(of("waiting"))),
    total(
      "tokens/s",
      number(tokensPerSecond(ids)),
      spark(pastRates(ids), "Tokens a second over the last minutes"),
    ),
  );
}

function total(name, value, more) {
  return el("div", { class: "total" }, el("strong", {}, value), el("span", {}, name), more);
}

function unwell(state) {
  const found = [
    ...state.models
      .filter((model) => ["failed", "degraded"].includes(model.status))
      .map((model) => `${model.name} is ${model.status}. ${model.message}`),
    ...state.nodes
      .filter((node) => node.status === "down")
      .map((node) => `Node ${node.name} is down.`),
    ...enginesOf(state)
      .filter((engine) => Object.keys(engine.borrowing?.problems ?? {}).length)
      .flatMap((engine) =>
        Object.entries(engine.borrowing.problems).map(
          ([lender, why]) => `${engine.model} on ${engine.device} has no loan of ${lender}: ${why}`,
        ),
      ),
  ];
  return found.length
    ? el(
        "div",
        { class: "unwell" },
        found.map((text) => notice(text, "bad")),
      )
    : null;
}

function nodes(state) {
  return section(
    "Nodes",
    table({
      columns: [
        ["node", (node) => node.name],
        ["status", (node) => badge(node.status)],
        ["gateways", (node) => number(node.gateways), { number: true }],
        ["replicas", (node) => number(node.replicas), { number: true }],
        ["", nodeButton],
      ],
      rows: state.nodes,
      keyOf: (node) => node.name,
    }),
  );
}

function nodeButton(node) {
  const path = `nodes/${inPath(node.name)}/drain`;
  return node.status === "up"
    ? changeButton("Drain", () => [path, { method: "POST" }], {
        label: `Drain ${node.name}`,
        confirm: `Have all that is open on ${node.name} go on elsewhere, and start nothing on it?`,
      })
    : changeButton("Give it work", () => [path, { method: "DELETE" }], {
        label: `Give ${node.name} work`,
      });
}

function deviceCard(device, engines) {
  const here = engines.filter(
    (engine) => engine.device === device.name && engine.node === device.node,
  );
  const stages = engines.filter((engine) =>
    engine.stages.slice(1).some((stage) => stage.device === device.name),
  );
  const place = [
    device.place,
    device.node === "local" ? null : device.node,
    device.memory && `${bytes(device.memory)} for models`,
  ];
  return el(
    "article",
    {
      class: "card device",
      "data-key": `${device.node}/${device.name}`,
      "aria-label": `Device ${device.name}`,
    },
    el(
      "header",
      {},
      el("h3", {}, device.name),
      el("span", { class: "about" }, place.filter(Boolean).join(" · ")),
    ),
    here.map(engineRow),
    stages.map((engine) =>
      el("p", { class: "about" }, `A stage of ${engine.model} on ${engine.device}`),
    ),
    here.length || stages.length ? null : empty("No engine."),
  );
}

function engineRow(engine) {
  const load = engine.load;
  const state = engine.draining ? "draining" : engine.asleep ? "asleep" : null;
  return el(
    "div",
    { class: "engine", "data-key": engine.id },
    el(
      "div",
      { class: "line" },
      el("a", { href: `#/models/${encodeURIComponent(engine.model)}` }, engine.model),
      state && badge(state),
      engine.role === "unified" ? null : badge(engine.role, "plain"),
    ),
    load ? measured(engine, load) : empty("Nothing is measured yet."),
  );
}

function measured(engine, load) {
  return [
    bar(
      load.kv_cache_usage,
      `KV memory of ${engine.model} on ${engine.device}`,
      `${percent(load.kv_cache_usage)} of KV`,
    ),
    el(
      "div",
      { class: "line figures" },
      el("span", {}, `${number(load.running)} running`),
      el("span", { class: load.waiting ? "warn" : null }, `${number(load.waiting)} waiting`),
      el("span", {}, `${number(tokensPerSecond([engine.id]))} tokens/s`),
      el("span", {}, `${seconds(load.step_time_s)} a step`),
    ),
  ];
}

function loans(state, lending) {
  return section(
    "Loans and moved parts",
    lending.loans.length ? weave(state.devices, state.models, lending.loans) : null,
    table({
      columns: [
        ["borrower", (loan) => place(state, loan.borrower, loan.borrower_replica)],
        ["lender", (loan) => place(state, loan.lender, loan.lender_replica)],
        ["state", (loan) => badge(loan.draining ? "draining" : loan.phase)],
        ["what", part],
        ["requests", (loan) => number(loan.requests), { number: true }],
        ["mean wait", (loan) => seconds(loan.wait_mean_us / 1e6), { number: true }],
        ["waited", (loan) => percent(loan.wait_share), { number: true }],
        ["computed", (loan) => percent(loan.service_share), { number: true }],
        [
          "",
          (loan) =>
            loan.draining
              ? ""
              : changeButton(
                  "End",
                  () => [`lending/loans/${inPath(loan.name)}/drain`, { method: "POST" }],
                  {
                    label: `End the loan of ${loan.borrower} with ${loan.lender}`,
                    confirm: `End the loan of ${loan.borrower} with ${loan.lender} once no request's KV is there?`,
                  },
                ),
        ],
      ],
      rows: lending.loans,
      keyOf: (loan) => loan.name,
      empty: "No loan is open.",
    }),
    lending.pairs.length ? pairs(lending) : null,
  );
}

function place(state, model, replica) {
  const found = enginesOf(state).find((engine) => engine.id === replica);
  return found ? `${model} on ${found.device}` : model;
}

// What lies with the lender: KV of whole requests, or heads or layers of the engine.
function part({ shard, usable_blocks: blocks, free_blocks: free }) {
  if (!shard) return `KV: ${number(blocks - free)} of ${plural(blocks, "block")}`;
  const what = shard.layers
    ? `layers ${shard.layers[0]} to ${shard.layers[1] - 1}`
    : plural(shard.heads, "KV head");
  return [what, " ", badge(shard.phase), shard.why && ` ${shard.why}`];
}

function pairs(lending) {
  return table({
    caption: "Pairs that may lend",
    columns: [
      ["borrower", (pair) => pair.borrower],
      ["lender", (pair) => pair.lender],
      ["state", (pair) => badge(pair.enabled ? "on" : "off", pair.enabled ? "good" : "quiet")],
      ["why there is no loan", (pair) => pair.problem ?? "–"],
      ["", pairButton],
    ],
    rows: lending.pairs,
    keyOf: (pair) => `${pair.borrower} ${pair.lender}`,
  });
}

function pairButton({ borrower, lender, enabled }) {
  return changeButton(
    enabled ? "Switch off" : "Switch on",
    () => [
      `lending/pairs/${inPath(borrower)}/${inPath(lender)}`,
      { method: "PUT", body: { enabled: !enabled } },
    ],
    {
      label: `Switch ${borrower} and ${lender} ${enabled ? "off" : "on"}`,
      confirm: enabled && `End all loans of ${borrower} with ${lender}, and open none?`,
    },
  );
}

function versions(versions) {
  return el(
    "footer",
    {},
    facts([
      ["Loomserve", versions.loomserve],
      ["vLLM", versions.vllm],
      ["Ray", versions.ray],
      ["Python", versions.python],
    ]),
  );
}
