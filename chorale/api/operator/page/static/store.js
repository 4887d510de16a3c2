// Conversations and their messages, in IndexedDB. Without it (some private windows), in memory.
//
// A conversation: {id, title, created, updated, chosen}. `chosen` says which branch is shown: it maps the id of
// a message ("" at the beginning) to that of the message that follows it.
// A message: {id, conversation, parent, role, created, ...}; see conversation.js.

import { root } from "./api.js";

const NAME = "chorale" + root;
const STORES = ["conversations", "messages"];
const memory = { conversations: new Map(), messages: new Map() };
const channel = "BroadcastChannel" in window ? new BroadcastChannel(NAME) : null;
let database = null;

const done = asked => new Promise((resolve, reject) => {
  asked.onsuccess = () => resolve(asked.result);
  asked.onerror = () => reject(asked.error);
});

// Opens the database. Returns whether conversations will be kept.
export async function open() {
  try {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => {
      asked.result.createObjectStore("conversations", { keyPath: "id" });
      asked.result.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
    };
    database = await done(asked);
  } catch { database = null; }
  return database !== null;
}

// Runs `work` with both object stores in one transaction, and waits until its changes are written.
async function write(work) {
  const change = database.transaction(STORES, "readwrite");
  const ended = new Promise((resolve, reject) => {
    change.oncomplete = resolve;
    change.onabort = change.onerror = () => reject(change.error);
  });
  work(...STORES.map(name => change.objectStore(name)));
  await ended;
}

const read = (name, ask) => done(ask(database.transaction(name).objectStore(name)));

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), byte => byte.toString(16).padStart(2, "0")).join("");

// Another tab's changes of the list.
export function onChange(listener) {
  if (channel) channel.onmessage = listener;
}
const changed = () => channel && channel.postMessage("changed");

export async function conversations() {
  const found = database ? await read("conversations", store => store.getAll()) : [...memory.conversations.values()];
  return found.sort((a, b) => b.updated - a.updated);
}

export async function messages(conversation) {
  if (!database) return [...memory.messages.values()].filter(message => message.conversation === conversation);
  return read("messages", store => store.index("conversation").getAll(conversation));
}

export const allMessages = async () => database ? read("messages", store => store.getAll()) : [...memory.messages.values()];

export async function save(conversation, ...changes) {
  if (!database) {
    memory.conversations.set(conversation.id, conversation);
    for (const message of changes) memory.messages.set(message.id, message);
  } else await write((conversations, messages) => {
    conversations.put(conversation);
    for (const message of changes) messages.put(message);
  });
  changed();
}

// Saves a message that grows, without telling other tabs.
export async function saveMessage(message) {
  if (!database) memory.messages.set(message.id, message);
  else await write((_, messages) => messages.put(message));
}

export async function removeMessage(id) {
  if (!database) memory.messages.delete(id);
  else await write((_, messages) => messages.delete(id));
}

export async function remove(conversation) {
  const found = await messages(conversation);
  if (!database) {
    memory.conversations.delete(conversation);
    for (const message of found) memory.messages.delete(message.id);
  } else await write((conversations, messages) => {
    conversations.delete(conversation);
    for (const message of found) messages.delete(message.id);
  });
  changed();
  return found;
}

export async function removeAll() {
  const found = await allMessages();
  if (!database) STORES.forEach(name => memory[name].clear());
  else await write((...stores) => stores.forEach(store => store.clear()));
  changed();
  return found;
}

// ------------------------------------------------------------------ export and import

const FORMAT = "chorale-conversations";

// Returns the text of a file with these conversations, or all.
export async function exported(only) {
  const kept = (await conversations()).filter(conversation => !only || conversation.id === only);
  const found = await Promise.all(kept.map(async each => ({ ...each, messages: await messages(each.id) })));
  return JSON.stringify({ format: FORMAT, version: 1, conversations: found }, null, 1);
}

// Adds the conversations of such a file. Returns how many were added, and how many were there already.
export async function imported(text) {
  let file;
  try { file = JSON.parse(text); } catch { throw new Error("The file is not JSON."); }
  if (!file || file.format !== FORMAT || !Array.isArray(file.conversations))
    throw new Error("The file was not exported from this page.");
  if (file.version !== 1) throw new Error("The file comes from a newer version of this page.");
  const known = new Set((await conversations()).map(each => each.id));
  const all = file.conversations.map(checked);  // before the first is saved
  const added = all.filter(([conversation]) => !known.has(conversation.id));
  for (const [conversation, found] of added) await save(conversation, ...found);
  return { added: added.length, known: all.length - added.length };
}

const isText = value => typeof value === "string";

function checked({ messages: found, ...given }) {
  const valid = isText(given.id) && given.id && isText(given.title) && Number.isFinite(given.updated)
    && given.chosen && typeof given.chosen === "object" && Array.isArray(found);
  if (!valid) throw new Error("The file is damaged: a conversation has no id, title or messages.");
  const { id, title, created, updated, chosen } = given;
  return [{ id, title, created, updated, chosen }, found.map(message => checkedMessage(message, id))];
}

function checkedMessage(message, conversation) {
  const ofUser = message && message.role === "user" && isText(message.text) && Array.isArray(message.files || []);
  const ofModel = message && message.role === "assistant" && Array.isArray(message.items)
    && message.items.every(item => item && isText(item.type) && Array.isArray(item.content || []));
  if (!(ofUser || ofModel) || !isText(message.id)) throw new Error("The file is damaged: a message is not complete.");
  return { ...message, conversation, status: message.status === "running" ? "stopped" : message.status };
}
