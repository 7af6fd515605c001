// A picture of the loans: devices as posts, loans as threads from the borrower's to the lender's.

import { el } from "./dom.js";
import { plural } from "./format.js";

const STEP = 150;
const FLOOR = 120;

export function weave(devices, models, loans) {
  const deviceOf = new Map(
    models.flatMap((model) => model.replicas.map((replica) => [replica.id, replica.device])),
  );
  const at = new Map(devices.map((device, index) => [device.name, STEP * (index + 0.5)]));
  const threads = loans
    .map((loan) => ({
      ...loan,
      from: at.get(deviceOf.get(loan.borrower_replica)),
      to: at.get(deviceOf.get(loan.lender_replica)),
    }))
    .filter((loan) => loan.from !== undefined && loan.to !== undefined)
    // Feet apart, so that each thread can be followed.
    .map((loan, index) => ({
      ...loan,
      from: loan.from + 14 * ((index % 5) - 2),
      to: loan.to + 14 * ((index % 5) - 2),
    }));
  const width = STEP * devices.length;
  const told = threads.map((loan) => `${loan.borrower} to ${loan.lender}`).join(", ");
  return el(
    "div",
    { class: "weave", tabindex: "0", role: "group", "aria-label": "Picture of the loans" },
    el(
      "svg",
      {
        viewBox: `0 0 ${width} ${FLOOR + 40}`,
        width,
        height: FLOOR + 40,
        role: "img",
        "aria-label": `Loans: ${told}`,
      },
      threads.map(thread),
      devices.map((device) => post(device.name, at.get(device.name))),
    ),
  );
}

function post(name, x) {
  const shown = name.length > 16 ? `${name.slice(0, 15)}…` : name;
  return el(
    "g",
    {},
    el("rect", { class: "post", x: x - 58, y: FLOOR, width: 116, height: 30, rx: 6 }),
    el("text", { x, y: FLOOR + 20, "text-anchor": "middle" }, shown),
  );
}

// Thicker with more requests; dotted where heads or layers are away.
function thread(loan) {
  const height = Math.min(FLOOR + 10, 30 + Math.abs(loan.to - loan.from) / 3);
  const middle = (loan.from + loan.to) / 2;
  const top = FLOOR - height;
  const across = `M${loan.from} ${FLOOR}C${loan.from} ${top} ${loan.to} ${top} ${loan.to} ${FLOOR}`;
  const round = `M${loan.from - 30} ${FLOOR}C${loan.from - 30} ${top} ${loan.from + 30} ${top} ${loan.from + 30} ${FLOOR}`;
  const what = loan.shard
    ? loan.shard.layers
      ? "layers"
      : "heads"
    : plural(loan.requests, "request");
  return el(
    "g",
    { class: `thread ${loan.shard ? "shard" : ""}` },
    el("path", {
      d: loan.from === loan.to ? round : across,
      "stroke-width": loan.shard ? 3 : 1.5 + Math.min(5, loan.requests / 3),
    }),
    el("text", { x: middle, y: FLOOR - 0.75 * height - 6, "text-anchor": "middle" }, what),
  );
}
