// One answer while it is made: sends the request, adds the events to the answer, follows it through losses of the
// connection and restarts of the server, and stops it.
//
// Responses run in the background on the server, which keeps their events, so that a page that was reloaded or
// cut off continues after the last event that it has. A server that cannot store them answers without that.

import { ApiError, events, health, isAway, request } from "./api.js";
import { fold } from "./conversation.js";

const SAVE_MS = 1000, STOP_MS = 4000, PATIENCE = 5;
const LOST = "The connection was lost, and this server cannot resume the answer.";
const GONE = "The server no longer has this answer. What had arrived before is kept here.";

class LostStream extends Error {}

const pause = (ms, signal) => new Promise((resolve, reject) => {
  signal.throwIfAborted();
  const timer = setTimeout(resolve, ms);
  signal.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, { once: true });
});

// Whether the server refuses only to run the response in the background.
const refusesBackground = error => error instanceof ApiError
  && (error.code === "store_unavailable" || error.param === "background" || /background/.test(error.message));

export class Run {
  // `hooks`: changed(answer, event), waiting(answer, words), save(answer), ended(answer).
  constructor(answer, hooks) {
    this.answer = answer;
    this.hooks = hooks;
    this.aborter = new AbortController();
    this.stopping = this.cancelling = false;
    this.saved = -Infinity;  // the first event is saved at once: it has the id by which the answer is resumed
  }

  // Sends a request and waits for the end of its answer.
  start(body) {
    return this.#run(async signal => {
      try {
        this.answer.resumable = true;
        return await request("/v1/responses", { body: { ...body, stream: true, store: true, background: true }, signal });
      } catch (error) {
        if (!refusesBackground(error)) throw error;
        this.answer.resumable = false;
        return request("/v1/responses", { body: { ...body, stream: true }, signal });
      }
    });
  }

  // Continues with an answer that a page that has been closed had begun.
  resume() {
    return this.#run(signal => this.#again(signal));
  }

  stop() {
    this.stopping = true;
    if (this.answer.resumable && !this.lost) {
      this.#cancel();
      setTimeout(() => this.aborter.abort(), STOP_MS);
    } else this.aborter.abort();
  }

  // Ends without a request.
  async refuse(words) {
    Object.assign(this.answer, { status: "failed", error: words });
    await this.hooks.save(this.answer);
    this.hooks.ended(this.answer);
  }

  // Ends because the answer was deleted.
  forget() {
    const nothing = () => {};
    this.hooks = { changed: nothing, waiting: nothing, save: nothing, ended: nothing };
    this.aborter.abort();
  }

  async #run(connect) {
    const { answer } = this, { signal } = this.aborter;
    try {
      for (let failures = 0, before = -1; ; ) {
        try {
          await this.#read(await connect(signal));
          break;
        } catch (error) {
          const sequence = answer.sequence ?? -1;
          failures = sequence > before ? 1 : failures + 1;
          before = sequence;
          await this.#recover(error, failures, signal);
          connect = again => this.#again(again);
        }
      }
    } catch (error) {
      this.#fail(error);
    } finally {
      await this.hooks.save(answer);
      this.hooks.ended(answer);
    }
  }

  async #read(response) {
    for await (const event of events(response)) {
      this.lost = false;
      if (event.type === "error") {
        const error = event.error || event;
        if (error.code === "server_restarted") throw new LostStream();
        throw new ApiError(200, error);
      }
      const ended = fold(this.answer, event);
      this.hooks.changed(this.answer, event);
      if (ended) return;
      if (this.stopping) this.#cancel();
      if (performance.now() - this.saved > SAVE_MS) {
        this.saved = performance.now();
        this.hooks.save(this.answer);
      }
    }
    throw new LostStream();
  }

  #again(signal) {
    const { response, sequence } = this.answer;
    const after = Number.isInteger(sequence) ? "&starting_after=" + sequence : "";
    return request("/v1/responses/" + encodeURIComponent(response) + "?stream=true" + after, { signal });
  }

  // Returns when it is worth trying again, else throws.
  async #recover(error, failures, signal) {
    const { answer } = this;
    signal.throwIfAborted();
    if (!(error instanceof LostStream || isAway(error)) || failures > PATIENCE) throw error;
    if (!answer.response) throw error;
    if (!answer.resumable) throw new Error(LOST);
    this.lost = true;
    this.hooks.waiting(answer, "The connection was lost. The answer continues when the server is back.");
    do await pause(1000, signal);
    while ((await health()).state !== "ready");
  }

  #fail(error) {
    const { answer } = this;
    if (this.stopping || this.aborter.signal.aborted) { answer.status = "stopped"; return; }
    answer.status = "failed";
    answer.error = isAway(error) && !(error instanceof ApiError && error.code) ? "The server does not answer." : error.message;
    if (error instanceof ApiError && error.status === 404 && error.param === "response_id") answer.error = GONE;
    answer.code = error instanceof ApiError ? error.status : null;
  }

  async #cancel() {
    if (this.cancelling || !this.answer.response) return;
    this.cancelling = true;
    try { await request("/v1/responses/" + encodeURIComponent(this.answer.response) + "/cancel", { method: "POST" }); }
    catch { this.aborter.abort(); }
  }
}
