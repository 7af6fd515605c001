// The KV store: what it holds, and for whom.

import { carryOut, changeButton } from "../actions.js";
import { ApiError } from "../api.js";
import { el } from "../dom.js";
import { bytes, number, percent, plural, seconds } from "../format.js";
import { bar, facts, field, heading, notice, section, select, table, valuesOf } from "../parts.js";

export const title = "KV store";
export const paths = { kv: "kv", keys: "keys" };

export function show({ kv, keys }) {
  if (kv instanceof ApiError) return [heading("KV store"), notice(kv.message)];
  return [
    heading(
      "KV store",
      "Blocks of prompts that engines share, and that outlive them.",
      flushButton(null),
    ),
    usage(kv),
    models(kv),
    Object.keys(kv.nodes).length ? stores(kv) : null,
    network(kv),
    pinForm(kv, keys),
  ];
}

function usage(kv) {
  return facts([
    [
      "memory",
      bar(
        kv.used_bytes / kv.capacity_bytes,
        "Memory",
        `${bytes(kv.used_bytes)} of ${bytes(kv.capacity_bytes)}`,
      ),
    ],
    kv.ssd_capacity_bytes
      ? [
          "SSD",
          bar(
            kv.ssd_used_bytes / kv.ssd_capacity_bytes,
            "SSD",
            `${bytes(kv.ssd_used_bytes)} of ${bytes(kv.ssd_capacity_bytes)}`,
          ),
        ]
      : null,
    ["about to read", number(kv.leases)],
    ["engines that write", number(kv.writers)],
    ["blocks with a wrong checksum", number(kv.corrupt_blocks)],
  ]);
}

function models(kv) {
  return section(
    "By model",
    table({
      columns: [
        ["model", (model) => model.model],
        [
          "in memory",
          (model) => `${plural(model.blocks_in_memory, "block")}, ${bytes(model.bytes_in_memory)}`,
          { number: true },
        ],
        [
          "on SSD",
          (model) => `${plural(model.blocks_on_ssd, "block")}, ${bytes(model.bytes_on_ssd)}`,
          { number: true },
        ],
        ["found", found],
        ["evicted", (model) => number(model.evicted_blocks), { number: true }],
        ["", (model) => flushButton(model.model)],
      ],
      rows: kv.models,
      keyOf: (model) => model.model,
      empty: "It holds nothing yet.",
    }),
  );
}

function found({ model, hit_blocks: hit, missed_blocks: missed }) {
  const all = hit + missed;
  return all
    ? bar(hit / all, `Blocks of ${model} found`, `${percent(hit / all)} of ${number(all)}`)
    : "–";
}

function flushButton(model) {
  return changeButton("Empty", () => ["kv/flush", { method: "POST", body: { model } }], {
    label: model ? `Forget the blocks of ${model}` : "Empty the store",
    kind: "danger",
    confirm: `Forget ${model ? `the blocks of ${model}` : "all blocks"} that nobody pinned and no request reads?`,
    done: (answer) => `Forgotten: ${plural(answer.blocks, "block")}.`,
  });
}

function stores(kv) {
  return section(
    "By node",
    table({
      columns: [
        ["node", ([name]) => name],
        [
          "memory",
          ([name, store]) =>
            bar(
              store.used_bytes / store.capacity_bytes,
              `Memory of ${name}`,
              `${bytes(store.used_bytes)} of ${bytes(store.capacity_bytes)}`,
            ),
        ],
        [
          "fetched from others",
          ([, store]) => bytes(store.network?.fetched_bytes),
          { number: true },
        ],
        [
          "blocks of others known",
          ([, store]) => number(store.network?.directory_blocks),
          { number: true },
        ],
      ],
      rows: Object.entries(kv.nodes),
      keyOf: ([name]) => name,
    }),
  );
}

function network(kv) {
  const peers = Object.values(kv.nodes)
    .concat(kv)
    .flatMap((store) =>
      (store.network?.peers ?? []).map((peer) => ({ ...peer, from: store.network.node })),
    );
  if (!peers.length) return null;
  return section(
    "Between nodes",
    table({
      columns: [
        ["to", (peer) => peer.from],
        ["from", (peer) => peer.node],
        ["fetches", (peer) => number(peer.fetches), { number: true }],
        ["until one begins", (peer) => seconds(peer.setup_s), { number: true }],
        ["then", (peer) => `${bytes(peer.bytes_per_s)}/s`, { number: true }],
      ],
      rows: peers,
      keyOf: (peer) => `${peer.from} ${peer.node}`,
    }),
  );
}

function pinForm(kv, keys) {
  const names = keys instanceof ApiError ? [] : keys.keys.map((key) => key.name);
  return section(
    "Pin a prompt",
    el(
      "p",
      { class: "about" },
      "The blocks of a text, such as a system prompt, are computed once and stay until they are let go.",
    ),
    el(
      "form",
      { class: "column", onsubmit: pin },
      field(
        "Model",
        select(
          "model",
          kv.models.map((model) => model.model),
        ),
      ),
      field("System message of a chat", el("textarea", { name: "text", rows: 3, required: true })),
      names.length
        ? field("Of the API key", select("api_key", [["", "(tenants are not isolated)"], ...names]))
        : null,
      el(
        "div",
        { class: "buttons" },
        el("button", { type: "submit", class: "primary", name: "pinned", value: "yes" }, "Pin"),
        el("button", { type: "submit", class: "plain", name: "pinned", value: "no" }, "Let go"),
      ),
    ),
  );
}

function pin(event) {
  const pinned = event.submitter?.value !== "no";
  const { model, text, api_key: key } = valuesOf(event);
  const body = {
    model,
    messages: [{ role: "system", content: text }],
    pinned,
    ...(key && { api_key: key }),
  };
  void carryOut(
    ["kv/pin", { method: "POST", body, timeoutMs: 60_000 }],
    (answer) =>
      `${pinned ? "Pinned" : "Let go"}: ${plural(answer.blocks, "block")}, of a text of ${plural(answer.prompt_tokens, "token")}.`,
  );
}
