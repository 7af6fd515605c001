// The platform's APIs. The token is in this tab's session storage, and goes nowhere but into the
// Authorization header of requests to this server.

const TOKEN = "loomserve.token";
const KEY = "loomserve.api_key";
const TIMEOUT_MS = 15_000;
// The console may lie under a proxy's own path, so all is relative to the folder above it.
const ROOT = new URL("../", document.baseURI);

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const session = {
  get token() {
    return sessionStorage.getItem(TOKEN);
  },
  enter(token) {
    sessionStorage.setItem(TOKEN, token);
  },
  leave() {
    sessionStorage.removeItem(TOKEN);
    sessionStorage.removeItem(KEY);
  },
  get apiKey() {
    return sessionStorage.getItem(KEY) ?? "";
  },
  set apiKey(key) {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  },
};

// JSON of the admin API; `path` is below /admin/v1/. Raises ApiError with the server's own words.
export async function ask(path, { method = "GET", body, token = session.token, timeoutMs } = {}) {
  const answer = await send(`admin/v1/${path}`, {
    method,
    headers: headers(token, body),
    body: body === undefined ? undefined : JSON.stringify(body),
    signal: AbortSignal.timeout(timeoutMs ?? TIMEOUT_MS),
  });
  if (!answer.ok) throw await errorOf(answer);
  return answer.status === 204 ? null : answer.json();
}

// The page of metrics, as text.
export async function metrics() {
  const answer = await send("metrics", {
    headers: headers(session.token),
    signal: AbortSignal.timeout(TIMEOUT_MS),
  });
  if (!answer.ok) throw await errorOf(answer);
  return answer.text();
}

// Events of a streamed answer of the OpenAI API, as JSON; `path` is below /v1/. With a `traceId` it
// is part of that trace, which is sent whatever share of others is.
export async function* stream(path, body, signal, traceId) {
  const trace = traceId && { traceparent: `00-${traceId}-${randomHex(8)}-01` };
  const answer = await send(`v1/${path}`, {
    method: "POST",
    headers: { ...headers(session.apiKey, body), ...trace },
    body: JSON.stringify(body),
    signal,
  });
  if (!answer.ok) throw await errorOf(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: {")) continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new ApiError(event.error.message, 200, event.error.code);
      yield event;
    }
  }
}

// Random bytes, such as the 16 of a trace's id.
export function randomHex(bytes) {
  const drawn = crypto.getRandomValues(new Uint8Array(bytes));
  return Array.from(drawn, (each) => each.toString(16).padStart(2, "0")).join("");
}

// A name as a part of a path; names of models may have slashes, which the API takes as they are.
export function inPath(name) {
  return name.split("/").map(encodeURIComponent).join("/");
}

function headers(token, body) {
  const given = {};
  if (token) given.Authorization = `Bearer ${token}`;
  if (body !== undefined) given["Content-Type"] = "application/json";
  return given;
}

async function send(path, options) {
  try {
    return await fetch(new URL(path, ROOT), { ...options, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const late = error.name === "TimeoutError";
    throw new ApiError(
      late ? "The platform did not answer in time." : "The platform cannot be reached.",
      0,
    );
  }
}

async function errorOf(answer) {
  try {
    const { error } = await answer.json();
    return new ApiError(error.message, answer.status, error.code);
  } catch {
    return new ApiError(`The answer was ${answer.status} without a reason.`, answer.status);
  }
}
