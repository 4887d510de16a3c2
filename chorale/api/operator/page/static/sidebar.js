// The list of conversations: search, rename, delete, export and import.

import { $, confirmed, iconButton, make, saveFile, toast } from "./dom.js";
import * as store from "./store.js";

let hooks, current = null, kept = true, searched = null, redrawing = null;

// `hooks`: open(id), removed(messages, id or null for all), renamed(conversation).
export async function start(given, isKept) {
  hooks = given;
  kept = isKept;
  $("search").addEventListener("input", search);
  $("export").addEventListener("click", async () => saveFile("chorale-conversations.json", await store.exported()));
  $("import").addEventListener("click", () => $("import-file").click());
  $("import-file").addEventListener("change", importFile);
  $("delete-all").addEventListener("click", deleteAll);
  $("open-sidebar").addEventListener("click", () => show(!isShown()));
  $("close-sidebar").addEventListener("click", () => show(false));
  $("shade").addEventListener("click", () => show(false));
  document.addEventListener("keydown", event => { if (event.key === "Escape" && isNarrow() && isShown()) show(false); });
  narrow.addEventListener("change", () => show(!isNarrow(), false));
  store.onChange(redraw);
  show(!isNarrow(), false);
  await redraw();
}

// ------------------------------------------------------------------ showing and hiding

const narrow = matchMedia("(max-width: 820px)");
export const isNarrow = () => narrow.matches;
const isShown = () => document.body.classList.contains("with-sidebar");

export function show(shown, moves = true) {
  document.body.classList.toggle("with-sidebar", shown);
  $("open-sidebar").setAttribute("aria-expanded", String(shown));
  $("sidebar").inert = !shown;
  $("page").inert = shown && isNarrow();
  if (moves && isNarrow()) (shown ? $("close-sidebar") : $("open-sidebar")).focus();
}

// ------------------------------------------------------------------ the list

export function select(id) {
  current = id;
  for (const node of $("list").querySelectorAll(".open")) {
    if (node.parentNode.dataset.id === id) node.setAttribute("aria-current", "true");
    else node.removeAttribute("aria-current");
  }
}

export function redraw() {
  redrawing ??= draw().finally(() => { redrawing = null; });
  return redrawing;
}

async function draw() {
  const all = await store.conversations();
  const found = searched === null ? all : all.filter(each => searched.has(each.id));
  if ($("list").querySelector("input")) return;  // a title is being edited
  const rows = [];
  let group = null;
  for (const conversation of found) {
    const label = age(conversation.updated);
    if (label !== group) rows.push(make("li", { class: "group" }, label));
    group = label;
    rows.push(entry(conversation));
  }
  $("list").replaceChildren(...rows);
  const words = !kept ? "This browser does not keep conversations: they end with this page." : found.length ? ""
    : searched !== null ? "No conversation contains this text." : "Your conversations will appear here.";
  $("list-note").textContent = words;
}

function age(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - 86400000) return "Yesterday";
  return time >= midnight - 6 * 86400000 ? "Last 7 days" : "Older";
}

function entry(conversation) {
  const { id, title } = conversation;
  const open = make("button", { type: "button", class: "open", "aria-current": id === current && "true", title, onclick: () => {
    hooks.open(id);
    if (isNarrow()) show(false);
  } }, make("span", {}, title));
  const node = make("li", { class: "entry", "data-id": id }, open, make("span", { class: "entry-actions" },
    iconButton("pencil", `Rename “${title}”`, () => rename(node, conversation)),
    iconButton("download", `Export “${title}”`, async () => saveFile("chorale-conversation.json", await store.exported(id))),
    iconButton("trash", `Delete “${title}”`, () => deleteOne(conversation))));
  return node;
}

function rename(node, conversation) {
  const box = make("input", { "aria-label": "Title", maxlength: "200" });
  box.value = conversation.title;
  let ended = false;
  const end = async keeps => {
    if (ended) return;
    ended = true;
    const title = box.value.trim();
    box.remove();
    if (keeps && title && title !== conversation.title) {
      conversation.title = title;
      hooks.renamed(conversation);
      await store.save(conversation);
    }
    await redraw();
    $("list").querySelector(`[data-id="${conversation.id}"] .open`)?.focus();
  };
  box.addEventListener("keydown", event => { if (event.key === "Enter") end(true); if (event.key === "Escape") { event.stopPropagation(); end(false); } });
  box.addEventListener("blur", () => end(true));
  node.replaceChildren(box);
  box.select();
}

async function deleteOne({ id, title }) {
  if (!await confirmed("Delete this conversation?", `“${title}” is deleted from this browser, and its answers from the server.`, "Delete")) return;
  hooks.removed(await store.remove(id), id);
  await redraw();
  $("new").focus();
}

async function deleteAll() {
  if (!await confirmed("Delete all conversations?", "They are deleted from this browser, and their answers from the server. This cannot be undone.", "Delete all")) return;
  hooks.removed(await store.removeAll(), null);
  await redraw();
  toast("All conversations were deleted.");
}

async function importFile(event) {
  const [file] = event.target.files;
  event.target.value = "";
  if (!file) return;
  try {
    const { added, known } = await store.imported(await file.text());
    await redraw();
    toast(`Imported ${added} ${added === 1 ? "conversation" : "conversations"}` + (known ? `; ${known} were here already.` : "."));
  } catch (error) { toast("Import failed. " + error.message); }
}

// ------------------------------------------------------------------ search, in titles and messages

async function search() {
  const words = $("search").value.trim().toLowerCase();
  if (!words) searched = null;
  else {
    const [all, messages] = await Promise.all([store.conversations(), store.allMessages()]);
    searched = new Set(all.filter(each => each.title.toLowerCase().includes(words)).map(each => each.id));
    for (const message of messages) if (textIn(message).toLowerCase().includes(words)) searched.add(message.conversation);
  }
  await redraw();
}

const textIn = ({ text, items = [], base }) => text ?? [...(base || []), ...items]
  .flatMap(item => item.type === "message" ? item.content.map(part => part.text || "") : []).join("\n");
