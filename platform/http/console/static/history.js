// What engines did lately, from what each said of itself: kept in this tab only.

const LENGTH = 60;
const WINDOW = 5;
const seen = new Map();

// Take in a state of the platform.
export function note(state) {
  const replicas = new Set();
  for (const model of state.models) {
    for (const replica of model.replicas) {
      replicas.add(replica.id);
      if (replica.load?.work) take(replica.id, replica.load.measured_at, replica.load.work.tokens);
    }
  }
  for (const id of seen.keys()) {
    if (!replicas.has(id)) seen.delete(id);
  }
}

// Tokens a second of some replicas together, of prompts and answers, over the last ten seconds.
export function tokensPerSecond(ids) {
  return sum(ids.map((id) => seen.get(id)?.rates.at(-1) ?? 0));
}

// The same over the last minutes, the oldest first.
export function pastRates(ids) {
  const all = ids.map((id) => seen.get(id)?.rates ?? []);
  const length = Math.max(0, ...all.map((rates) => rates.length));
  return Array.from({ length }, (_, at) => sum(all.map((rates) => rates.at(at - length) ?? 0)));
}

function take(id, at, tokens) {
  const known = seen.get(id) ?? { points: [], rates: [] };
  const last = known.points.at(-1);
  if (last && last.at >= at) return;
  known.points.push({ at, tokens });
  const first = known.points.at(-Math.min(known.points.length, WINDOW + 1));
  if (at > first.at) known.rates.push(Math.max(0, (tokens - first.tokens) / (at - first.at)));
  known.points.splice(0, known.points.length - LENGTH);
  known.rates.splice(0, known.rates.length - LENGTH);
  seen.set(id, known);
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}
