// The conversation that is shown, and the answers that are being made, in this conversation or another.

import { request } from "./api.js";
import { itemsOf, textOf, titleOf, toInput, Tree } from "./conversation.js";
import { $, announce, toast } from "./dom.js";
import * as files from "./files.js";
import { Run } from "./run.js";
import { requestFields } from "./settings.js";
import * as store from "./store.js";
import { Turn } from "./view.js";

const INCLUDE = ["metrics", "web_search_call.results", "code_interpreter_call.outputs"];
const NEAR = 80, TOOL_MS = 2000;

let tree = null, hooks, model = null, limit = Infinity;
const turns = new Map(), runs = new Map(), trees = new Map(), waiting = new Map(), begun = new Map();

// `hooks`: changed() when buttons outside may need to change, listed() when the list must be drawn again,
// server() returns the server's settings, needsKey().
export function start(given) { hooks = given; }

export function setServer(name, bytes) { model = name; limit = bytes; }

export const currentId = () => tree && tree.conversation.id;
export const title = () => tree && tree.conversation.title;
export const isBusy = () => Boolean(tree) && [...runs.values()].some(run => run.answer.conversation === currentId());

// ------------------------------------------------------------------ opening

export function fresh() {
  tree = null;
  draw();
}

// Shows a conversation, and continues answers that were in progress when its page was closed.
export async function open(id) {
  const found = (await store.conversations()).find(each => each.id === id);
  if (!found) return fresh();
  tree = trees.get(id) || new Tree(found, await store.messages(id));
  turns.clear();
  for (const message of tree.messages.values()) if (message.status === "running" && !runs.has(message.id)) resume(tree, message);
  draw();
  toEnd();
}

function resume(owner, answer) {
  if (answer.resumable && answer.response) { follow(owner, answer, run => run.resume(), true); return; }
  answer.status = "failed";
  answer.error = "The answer was cut off when the page was closed.";
  store.saveMessage(answer);
}

export function renamed(conversation) {
  const known = trees.get(conversation.id) || (currentId() === conversation.id ? tree : null);
  if (known) known.conversation.title = conversation.title;
  hooks.changed();
}

// Forgets deleted messages, and deletes their answers on the server as far as it has them.
export async function removed(messages, id) {
  for (const run of [...runs.values()]) if (id === null || run.answer.conversation === id) {
    run.forget();
    runs.delete(run.answer.id);
    trees.delete(run.answer.conversation);
  }
  if (id === null || id === currentId()) fresh();
  for (const { response } of messages) {
    if (!response) continue;
    try { await request("/v1/responses/" + encodeURIComponent(response), { method: "DELETE" }); }
    catch (error) { if (error.status !== 404) return; }
  }
}

// ------------------------------------------------------------------ asking

export async function ask(text, attached) {
  const now = Date.now();
  if (!tree) tree = new Tree({ id: store.newId(), title: titleOf(text, attached), created: now, updated: now, chosen: {} }, []);
  const last = tree.thread().at(-1);
  await answerTo(tree, { id: store.newId(), conversation: currentId(), parent: last ? last.id : "", role: "user", text, files: attached });
}

async function answerTo(owner, question) {
  owner.add(question);
  await generate(owner, question);
}

async function generate(owner, question) {
  const answer = { id: store.newId(), conversation: owner.conversation.id, parent: question.id, role: "assistant",
    items: [], status: "running", thinking: {}, model };
  const thread = upTo(owner, question);
  owner.add(answer);
  owner.conversation.updated = Date.now();
  const ending = follow(owner, answer, run => send(run, thread, {}));
  await store.save(owner.conversation, question, answer).catch(failedToSave);
  hooks.listed();
  toEnd();
  return ending;
}

// Sends a request, unless it is larger than the server accepts.
function send(run, thread, more) {
  const body = { model, input: toInput(thread), include: INCLUDE, ...requestFields(), ...more };
  if (new Blob([JSON.stringify(body)]).size <= limit) return run.start(body);
  return run.refuse("The conversation and its files are larger than this server accepts. Start a new chat, or attach less.");
}

function upTo(owner, message) {
  const found = [];
  for (let at = message; at; at = owner.messages.get(at.parent)) found.unshift(at);
  return found;
}

const turnHooks = {
  isAtEnd, toEnd,
  edit(message, text, kept) {
    answerTo(tree, { ...message, id: store.newId(), text, files: kept });
  },
  async regenerate(answer) {
    const owner = tree, question = owner.messages.get(answer.parent);
    if (answer.status === "failed" && !itemsOf(answer).length) {
      owner.remove(answer);
      await store.removeMessage(answer.id);
    }
    generate(owner, question);
  },
  // The API continues the last message; an answer that stopped elsewhere begins its next step.
  async continue(answer) {
    const owner = tree, base = itemsOf(answer), last = base.at(-1);
    const joins = ["message", "reasoning"].includes(last.type) && last.status !== "completed";
    const thread = upTo(owner, { ...answer, base: null, items: base });
    Object.assign(answer, { base, joins, items: [], status: "running", sequence: null, response: null, usage: null, metrics: null, error: null });
    turns.delete(answer.id);
    follow(owner, answer, run => send(run, thread, joins ? { continue_final_message: true } : {}));
  },
  choose(message) {
    tree.choose(message);
    store.save(tree.conversation).catch(failedToSave);
    draw();
    turns.get(message.id)?.node.querySelector(".branches button:not(:disabled)")?.focus();
  },
};

const failedToSave = error => toast("The conversation could not be saved in this browser: " + error.message);

// ------------------------------------------------------------------ answers in progress

function follow(owner, answer, go, isReplay = false) {
  const run = new Run(answer, runHooks);
  run.isReplay = isReplay;
  runs.set(answer.id, run);
  trees.set(owner.conversation.id, owner);
  if (!isReplay) announce("The model is answering.");
  draw();
  return go(run);
}

const runHooks = {
  changed(answer, event) {
    measureThought(answer, event);
    if (event.type === "response.code_interpreter_call.interpreting") watchTool(answer, answer.items[event.output_index]);
    if (waiting.delete(answer.id)) drawStates();
    const turn = turns.get(answer.id);
    if (!turn) return;
    if (event.type === "response.output_item.added") turn.note.replaceChildren();
    turn.changed();
  },
  waiting(answer, words) {
    waiting.set(answer.id, words);
    drawStates();
  },
  save: answer => store.saveMessage(answer).catch(failedToSave),
  ended(answer) {
    const shown = turns.has(answer.id), owner = trees.get(answer.conversation);
    runs.delete(answer.id);
    waiting.delete(answer.id);
    if (answer.status === "failed" && answer.base && !answer.items.length) {  // the continuation was refused
      answer.items = answer.base;
      answer.base = null;
    }
    if (![...runs.values()].some(run => run.answer.conversation === answer.conversation)) trees.delete(answer.conversation);
    if (answer.code === 401) {  // the question is asked again with the right key
      hooks.needsKey(() => { if (tree === owner) turnHooks.regenerate(answer); });
    }
    if (shown) {
      announce(answer.status === "failed" ? "" : "Answer: " + textOf(answer).slice(0, 2000));
      draw();
    }
    hooks.listed();
  },
};

function measureThought(answer, event) {
  const { item } = event;
  if (!item || item.type !== "reasoning" || runs.get(answer.id)?.isReplay) return;
  if (event.type === "response.output_item.added") begun.set(item.id, performance.now());
  if (event.type === "response.output_item.done" && begun.has(item.id)) {
    answer.thinking[item.id] = (performance.now() - begun.get(item.id)) / 1000;
    begun.delete(item.id);
  }
}

// While a call of Python lasts, asks the server whether it waits for something.
async function watchTool(answer, item) {
  for (;;) {
    await new Promise(resolve => setTimeout(resolve, TOOL_MS));
    if (!runs.has(answer.id) || item.status !== "interpreting") return;
    const found = (await hooks.server()).tools.find(tool => tool.id === "code_interpreter");
    if (!found || !found.waiting || item.status !== "interpreting") return;
    runHooks.waiting(answer, found.waiting);
  }
}

export function stop() {
  for (const run of runs.values()) if (run.answer.conversation === currentId()) run.stop();
}

// ------------------------------------------------------------------ drawing

function draw() {
  const thread = tree ? tree.thread() : [];
  for (const message of thread) if (!turns.has(message.id)) turns.set(message.id, new Turn(message, turnHooks));
  const shown = new Set(thread.map(message => message.id));
  for (const id of turns.keys()) if (!shown.has(id)) turns.delete(id);
  const nodes = thread.map(message => turns.get(message.id).node);
  if (nodes.some((node, place) => $("turns").children[place] !== node) || nodes.length !== $("turns").children.length)
    $("turns").replaceChildren(...nodes);
  $("hello").hidden = thread.length > 0;
  drawStates();
  hooks.changed();
}

function drawStates() {
  const thread = tree ? tree.thread() : [], busy = isBusy();
  for (const message of thread) {
    const options = { isLast: message === thread.at(-1), waiting: waiting.get(message.id), busy };
    turns.get(message.id)?.drawState(tree.versions(message), options);
  }
}

function isAtEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
}

export function toEnd() { $("log").scrollTop = $("log").scrollHeight; }

export function watchScroll() {
  const update = () => { $("to-end").hidden = isAtEnd(); };
  $("log").addEventListener("scroll", update, { passive: true });
  new ResizeObserver(update).observe($("turns"));
  $("to-end").addEventListener("click", () => { toEnd(); $("log").focus(); });
}
