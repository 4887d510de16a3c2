// Starts the page: the server's state, the composer, the tabs and the prompt for the API key.

import { ApiError, getJson, hasKey, health, setKey } from "./api.js";
import * as chat from "./chat.js";
import { $, drawIcons, make } from "./dom.js";
import * as files from "./files.js";
import * as server from "./server.js";
import { chooseTools, setTools, start as startSettings } from "./settings.js";
import * as sidebar from "./sidebar.js";
import * as store from "./store.js";

const EVERY_MS = 2000, LOADING_MS = 1000;
const PHASES = {
  start: "starting", download: "downloading", device: "preparing the device", load: "reading the weights", compile: "compiling kernels",
  kv_pool: "reserving memory", warm_up: "warming up", graphs: "capturing graphs",
};
let model = null, state = { state: "connecting" }, asksKey = false;

// ------------------------------------------------------------------ the state of the server

// Polls as long as the page is open: it begins before the model is loaded, and survives restarts.
async function watch() {
  for (;;) {
    await look().catch(error => console.error(error));
    await new Promise(resolve => setTimeout(resolve, state.state === "ready" ? EVERY_MS : LOADING_MS));
  }
}

async function look() {
  const before = state.state;
  state = await health();
  if (state.state !== "ready") {
    if (before === "ready") model = null;
    if (state.state !== "away" && !known) await readServer().catch(() => {});
    server.silent(state.state === "away" ? "The server does not answer." : "The model is not ready.");
  } else if (!model && !asksKey) await connect();
  showState();
  if (state.state === "ready") await server.poll().catch(error => server.silent("No metrics: " + error.message));
}

let known = null;
async function readServer() {
  known = await getJson("/page/settings");
  $("about").textContent = known.about;
  files.setLimit(known.max_body_bytes);
  chat.setServer(model, known.max_body_bytes);
  setTools(known.tools);
  const text = JSON.stringify(known.examples);
  if ($("examples").dataset.text === text) return known;
  $("examples").dataset.text = text;
  $("examples").replaceChildren(...known.examples.map(example => make("button", { type: "button", onclick: () => {
    if (!ready()) return;
    if (example.tool) chooseTools([example.tool]);
    chat.ask(example.text, []);
  } }, example.text)));
  return known;
}

async function connect() {
  try {
    const found = (await getJson("/v1/models")).data[0].id;
    model = found;
    await readServer();
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) askKey();
    else model = null;
  }
}

function showState() {
  const percent = Number.isFinite(state.progress) ? ` ${Math.round(state.progress * 100)} %` : "";
  const phase = PHASES[state.phase] || "";
  const words = {
    ready: asksKey ? "API key required" : model || "Connecting", connecting: "Connecting", loading: "Loading the model",
    away: "Server away", failed: "The engine failed", dead: "Restarting", draining: "Shutting down",
  }[state.state] || state.state;
  $("model").textContent = words;
  $("dot").className = state.state;
  const banner = {
    loading: `The model is loading${phase ? ` (${phase})` : ""}${percent ? ":" + percent : "…"}`,
    away: "The server does not answer. The page tries again every second.",
    failed: "The engine failed" + (state.message ? ": " + state.message : "."),
    dead: "The engine is restarting.",
    draining: "The server is shutting down.",
  }[state.state] || "";
  if ($("banner").dataset.text !== banner) drawBanner(banner);
  refresh();
}

function drawBanner(text) {
  const box = $("banner");
  box.dataset.text = text;
  box.hidden = !text;
  box.className = state.state;
  const bar = Number.isFinite(state.progress) ? make("progress", { max: "1", value: state.progress, "aria-label": "Loading" }) : null;
  box.replaceChildren(make("span", {}, text), ...(bar ? [bar] : []));
}

// ------------------------------------------------------------------ the composer

const ready = () => state.state === "ready" && model && !chat.isBusy();

function refresh() {
  const busy = chat.isBusy();
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("send").disabled = !ready() || !($("text").value.trim() || files.hasAny());
  for (const button of $("examples").children) button.disabled = !ready();
  const title = chat.title();
  document.title = title ? title + " – Chorale" : "Chorale";
  const id = chat.currentId();
  if (location.hash.slice(1) !== (id || "")) history.replaceState(null, "", id ? "#" + id : location.pathname + location.search);
  sidebar.select(id);
}

function grow() {
  const box = $("text");
  box.style.height = "auto";
  box.style.height = box.scrollHeight + "px";
}

function send() {
  const text = $("text").value.trim();
  if (!ready() || !(text || files.hasAny())) return;
  $("text").value = "";
  grow();
  chat.ask(text, files.take());
}

function startComposer() {
  $("text").addEventListener("input", () => { grow(); refresh(); });
  new MutationObserver(refresh).observe($("files"), { childList: true });
  $("text").addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  $("form").addEventListener("submit", event => { event.preventDefault(); send(); });
  $("stop").addEventListener("click", chat.stop);
  $("new").addEventListener("click", () => {
    chat.fresh();
    if (sidebar.isNarrow()) sidebar.show(false);
    $("text").focus();
  });
  files.start();
}

// ------------------------------------------------------------------ the API key

function askKey(then = null) {
  asksKey = true;
  model = null;
  $("key-error").hidden = !hasKey();
  $("key-input").value = "";
  const box = $("key");
  if (!box.open) box.showModal();
  box.addEventListener("cancel", event => event.preventDefault());
  box.addEventListener("close", async () => {
    setKey($("key-input").value.trim());
    asksKey = false;
    await connect();
    showState();
    if (then && ready()) then();
  }, { once: true });
}

// ------------------------------------------------------------------ tabs

const TABS = ["chat", "server"];

function show(name) {
  for (const tab of TABS) {
    $(tab).hidden = tab !== name;
    $("tab-" + tab).setAttribute("aria-selected", String(tab === name));
    $("tab-" + tab).tabIndex = tab === name ? 0 : -1;
  }
  server.draw();
}

function startTabs() {
  for (const tab of TABS) $("tab-" + tab).addEventListener("click", () => show(tab));
  $("tabs").addEventListener("keydown", event => {
    const place = TABS.findIndex(tab => $("tab-" + tab) === document.activeElement);
    const next = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: TABS.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const tab = TABS[(next + TABS.length) % TABS.length];
    show(tab);
    $("tab-" + tab).focus();
  });
}

// ------------------------------------------------------------------ start

async function start() {
  drawIcons();
  startTabs();
  const isKept = await store.open();
  startSettings();
  chat.start({ changed: refresh, listed: sidebar.redraw, server: readServer, needsKey: askKey });
  chat.watchScroll();
  startComposer();
  await sidebar.start({ open: chat.open, removed: chat.removed, renamed: chat.renamed }, isKept);
  const id = location.hash.slice(1);
  if (id) await chat.open(id);
  if (!sidebar.isNarrow()) $("text").focus();
  watch();
}

start();
