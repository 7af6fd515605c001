// What pages are made of: tables, badges, bars, buttons.

import { el } from "./dom.js";

// A table with a caption. `columns`: [heading, how a row is shown (text or nodes), {number}], without
// a heading what can be done with a row; `keyOf` gives each row its identity. On a phone each row is a card.
export function table({ caption, columns, rows, keyOf, empty = "None." }) {
  if (!rows.length) return el("p", { class: "empty" }, empty);
  const head = columns.map(([name, , options]) =>
    el(
      "th",
      { role: "columnheader", scope: "col", class: options?.number && "number" },
      name || el("span", { class: "unseen" }, "Actions"),
    ),
  );
  const body = rows.map((row, at) =>
    el(
      "tr",
      { role: "row", "data-key": keyOf ? keyOf(row) : at },
      columns.map(([name, show, options]) =>
        el(
          "td",
          {
            role: "cell",
            "data-label": name,
            class: name ? options?.number && "number" : "actions",
          },
          el("span", { class: "value" }, show(row)),
        ),
      ),
    ),
  );
  return el(
    "table",
    { role: "table" },
    caption && el("caption", {}, caption),
    el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, head)),
    el("tbody", { role: "rowgroup" }, body),
  );
}

export function section(title, ...children) {
  const id = `s-${slug(title)}`;
  return el(
    "section",
    { "aria-labelledby": id, "data-key": id },
    el("h2", { id }, title),
    children,
  );
}

function slug(text) {
  return text.toLowerCase().replace(/[^a-z0-9]+/g, "-");
}

const KINDS = {
  good: ["ready", "up", "done", "completed", "open", "cold", "unified"],
  busy: [
    "loading",
    "waking",
    "running",
    "settling",
    "aborting",
    "draining",
    "in_progress",
    "validating",
    "finalizing",
    "leaving",
    "returning",
    "away",
    "proposed",
    "probing",
    "begun",
  ],
  quiet: [
    "asleep",
    "unloaded",
    "unloading",
    "drained",
    "replaced",
    "cancelled",
    "left",
    "pending",
    "aborted",
    "off",
    "home",
    "switched",
  ],
  bad: ["failed", "degraded", "down", "hot", "stopped", "eject", "expired", "late"],
};

// A state in a word; what kind it is shows in its colour and in its mark.
export function badge(text, kind = kindOf(text)) {
  return el("span", { class: `badge ${kind}` }, text.replaceAll("_", " "));
}

export function kindOf(text) {
  return Object.keys(KINDS).find((kind) => KINDS[kind].includes(text)) ?? "plain";
}

// A share of 0 to 1 as a bar, with what it says beside it.
export function bar(share, label, text) {
  const width = Math.max(0, Math.min(1, share ?? 0));
  const kind = width > 0.9 ? "full" : width > 0.7 ? "much" : "some";
  return el(
    "span",
    { class: "bar" },
    el(
      "svg",
      {
        viewBox: "0 0 100 8",
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": `${label}: ${text}`,
      },
      el("rect", { class: "trough", width: 100, height: 8, rx: 2 }),
      el("rect", { class: kind, width: 100 * width, height: 8, rx: 2 }),
    ),
    el("span", { class: "bar-text" }, text),
  );
}

// The last values as a line; the newest is at the right.
export function spark(values, label) {
  const most = Math.max(1e-9, ...values);
  const points = values.map(
    (value, at) => `${(100 * (at + 60 - values.length)) / 59},${23 - (22 * value) / most}`,
  );
  return el(
    "svg",
    {
      class: "spark",
      viewBox: "0 0 100 24",
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": label,
    },
    values.length > 1 && el("polyline", { points: points.join(" ") }),
  );
}

// Facts as pairs of a name and a value; null leaves one out.
export function facts(pairs) {
  return el(
    "dl",
    { class: "facts" },
    pairs
      .filter(Boolean)
      .map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
  );
}

export function notice(text, kind = "plain") {
  return el("p", { class: `notice ${kind}` }, text);
}

export function empty(text) {
  return el("p", { class: "empty" }, text);
}

// A field with its label, which no other of the page has; `control` is an input, a select or a
// textarea.
export function field(label, control, hint) {
  const id = `f-${slug(label)}`;
  control.id = id;
  if (hint) control.setAttribute("aria-describedby", `${id}-hint`);
  return el(
    "div",
    { class: "field" },
    el("label", { for: id }, label),
    hint && el("small", { id: `${id}-hint` }, hint),
    control,
  );
}

export function select(name, values, chosen, properties = {}) {
  return el(
    "select",
    { name, ...properties },
    values.map((value) => {
      const [given, shown] = Array.isArray(value) ? value : [value, value];
      return el("option", { value: given, selected: given === chosen }, shown);
    }),
  );
}

// The fields of the form that an event came from, by name, trimmed; empty ones are left out.
export function valuesOf(event) {
  event.preventDefault();
  const entries = [...new FormData(event.currentTarget)].map(([name, value]) => [
    name,
    value.trim(),
  ]);
  return Object.fromEntries(entries.filter(([, value]) => value !== ""));
}

export function heading(title, about, ...beside) {
  return el(
    "header",
    { class: "page-head" },
    el("div", {}, el("h1", { tabindex: "-1" }, title), about && el("p", { class: "about" }, about)),
    beside.length ? el("div", { class: "beside" }, beside) : null,
  );
}
