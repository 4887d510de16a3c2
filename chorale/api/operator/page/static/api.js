// Requests to the server that served this page.

export const root = location.pathname.replace(/\/+$/, "");
const KEY = "chorale-key";

export class ApiError extends Error {
  constructor(status, error, retryAfter) {
    super(error.message || "The server answered with HTTP " + status + ".");
    this.status = status;
    this.code = error.code || null;
    this.param = error.param || null;
    this.retryAfter = retryAfter;
  }
}

// True for errors of the network, after which the server may come back.
export const isAway = error => error instanceof TypeError || (error instanceof ApiError && [502, 503, 504].includes(error.status));

export const setKey = key => sessionStorage.setItem(KEY, key);
export const hasKey = () => Boolean(sessionStorage.getItem(KEY));

export async function request(path, { body, ...options } = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...(key ? { authorization: "Bearer " + key } : {}) };
  if (body !== undefined) {
    headers["content-type"] = "application/json";
    options = { method: "POST", body: JSON.stringify(body), ...options };
  }
  const response = await fetch(root + path, { cache: "no-store", ...options, headers });
  if (!response.ok) {
    // The server's own words; a proxy in front of it may send a page instead.
    const answer = await response.json().catch(() => ({}));
    throw new ApiError(response.status, (answer && answer.error) || {}, Number(response.headers.get("retry-after")) || null);
  }
  return response;
}

export const getJson = async (path, options) => (await request(path, options)).json();

// Yields the events of a stream of server-sent events.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter(line => line.startsWith("data: ")).map(line => line.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// Returns {state, phase, progress, message}: "ready", "loading", "failed", "draining" or "away".
export async function health() {
  let response;
  try {
    response = await fetch(root + "/health", { cache: "no-store", signal: AbortSignal.timeout(10000) });
  } catch { return { state: "away" }; }
  if (response.ok) return { state: "ready" };
  const body = await response.json().catch(() => ({}));
  if (!body.status) return { state: "away" };
  return { state: body.status, phase: body.phase, progress: body.progress, message: body.message };
}
