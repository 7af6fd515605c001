// Requests that wait at gateways, of which only the page of metrics tells. It asks each replica, so
// it is asked for less often than the rest.

import { metrics } from "./api.js";

const PERIOD_MS = 10_000;
const SAMPLE = /^loomserve_gateway_queue\{(.*)\} (\S+)$/gm;
const MODEL = /(?:^|,)model="((?:[^"\\]|\\.)*)"/;
let known = { queues: null, askedAt: 0 };

// Requests that wait by model, over all front ends; null until it is known. `redraw` is called when
// there is something new.
export function queues(redraw) {
  if (Date.now() - known.askedAt > PERIOD_MS) void refresh(redraw);
  return known.queues;
}

async function refresh(redraw) {
  known.askedAt = Date.now();
  const page = await metrics().catch(() => null);
  known.queues = page === null ? null : read(page);
  redraw();
}

function read(page) {
  const found = new Map();
  for (const [, labels, value] of page.matchAll(SAMPLE)) {
    const model = MODEL.exec(labels)?.[1].replace(/\\(.)/g, "$1");
    if (model !== undefined) found.set(model, (found.get(model) ?? 0) + Number(value));
  }
  return found;
}
