// Numbers and times for people. A number and its unit stay on one line.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let at = 0;
  let left = count;
  while (Math.abs(left) >= 1024 && at < UNITS.length - 1) {
    left /= 1024;
    at += 1;
  }
  return `${at && left < 10 ? left.toFixed(1) : Math.round(left)}\u00a0${UNITS[at]}`;
}

export function number(value, digits = 0) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

export function percent(share, digits = 0) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(digits)}\u00a0%`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0\u00a0s";
  if (Math.abs(value) < 0.001) return `${number(1e6 * value)}\u00a0µs`;
  if (Math.abs(value) < 1) return `${number(1e3 * value, value < 0.01 ? 1 : 0)}\u00a0ms`;
  if (value < 60) return `${number(value, 1)}\u00a0s`;
  if (value < 3600) return `${Math.floor(value / 60)}\u00a0min ${Math.round(value % 60)}\u00a0s`;
  if (value < 86400)
    return `${Math.floor(value / 3600)}\u00a0h ${Math.floor((value % 3600) / 60)}\u00a0min`;
  return `${Math.floor(value / 86400)}\u00a0d ${Math.floor((value % 86400) / 3600)}\u00a0h`;
}

// Unix seconds as a time of day, with the date if it is not today's.
export function moment(at) {
  if (at === null || at === undefined) return "–";
  const date = new Date(1000 * at);
  const today = date.toDateString() === new Date().toDateString();
  const time = date.toLocaleTimeString("en-GB");
  return today ? time : `${date.toISOString().slice(0, 10)} ${time}`;
}

export function plural(count, one, many = `${one}s`) {
  return `${number(count)} ${count === 1 ? one : many}`;
}
