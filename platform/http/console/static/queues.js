// Requests that wait at gateways, of which only the page of metrics tells; it asks each replica.

import { metrics } from "./api.js";
import { occasionally } from "./occasionally.js";

const SAMPLE = /^loomserve_gateway_queue\{(.*)\} (\S+)$/gm;
const MODEL = /(?:^|,)model="((?:[^"\\]|\\.)*)"/;

// By model, over all gateways.
export const queues = occasionally(async () => read(await metrics()), 10_000);

function read(page) {
  const found = new Map();
  for (const [, labels, value] of page.matchAll(SAMPLE)) {
    const model = MODEL.exec(labels)?.[1].replace(/\\(.)/g, "$1");
    if (model !== undefined) found.set(model, (found.get(model) ?? 0) + Number(value));
  }
  return found;
}
