"use strict";
// Data reach the document through textContent only.
const PAGE = 100;
const [TASK, EFFORT, SAMPLE, REPEAT, GROUP, STATUS, SCORE, CUT, ANSWER, TARGET, TOKENS, CHUNK, PLACE] = Array(13).keys();
const $ = (id) => document.getElementById(id);
const cache = new Map();
let index = [], shown = [], page = 0, picked = -1, scan = 0;

async function unpack(id) {
  const text = atob($(id).textContent);
  const bytes = Uint8Array.from(text, (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

async function chunk(number) {
  if (!cache.has(number)) {
    if (cache.size > 15) cache.delete(cache.keys().next().value);
    cache.set(number, await unpack("chunk-" + number));
  }
  return cache.get(number);
}

function make(name, text, cls) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (cls) node.className = cls;
  return node;
}

const percent = (value) => (value === null ? "-" : (100 * value).toFixed(1) + " %");
const say = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 1));

function state(row) {
  if (row[STATUS] !== "answered") return "trouble";
  return row[SCORE] >= 1 ? "right" : row[SCORE] > 0 ? "partial" : "wrong";
}

function results(head) {
  const run = head.run, summary = head.summary;
  $("title").textContent = "Evaluation of " + (run.settings.model || "a model");
  document.title = $("title").textContent;
  const settings = Object.entries(run.settings).filter(([name, value]) => value !== null && name !== "model");
  $("about").textContent = [
    run.base_url || "private server", "started " + run.started, "chorale " + run.chorale,
    ...settings.map(([name, value]) => name + " " + say(value)),
  ].join(" · ");
  const names = ["task", "effort", "n", "repeats", "score", "95 % interval", "cut", "refused", "failed", "tokens in", "tokens out"];
  const line = make("tr");
  names.forEach((name) => line.append(make("th", name)));
  $("results").append(line);
  for (const one of summary.results || []) {
    const row = make("tr");
    const cells = [
      one.task, one.effort, one.samples, one.repeats, percent(one.score), percent(one.low) + " to " + percent(one.high),
      one.cut, one.refused, one.failed, one.input_tokens, one.output_tokens,
    ];
    cells.forEach((cell) => row.append(make("td", String(cell))));
    $("results").append(row);
    if ((one.breakdowns || []).length) {
      const parts = one.breakdowns.map(([name, score, count]) => `${name || "(no group)"} ${percent(score)} of ${count}`);
      const more = make("details");
      more.append(make("summary", `${one.task} ${one.effort} by group`), make("p", parts.join(", ")));
      $("notes").append(more);
    }
  }
  for (const [name, task] of Object.entries(run.tasks)) {
    const parts = [name, "version " + task.version, task.data_revision, task.notes].filter(Boolean);
    $("notes").append(make("p", parts.join(" · "), "soft"));
  }
}

function options(id, values) {
  const all = make("option", "all");
  all.value = "";
  $(id).append(all);
  [...new Set(values)].sort().forEach((value) => $(id).append(make("option", value)));
}

const taskOf = (row) => row[TASK] + " " + row[EFFORT];

function passes(row) {
  const task = $("by-task").value, group = $("by-group").value, wanted = $("by-state").value;
  if (task && taskOf(row) !== task) return false;
  if (group && row[GROUP] !== group) return false;
  if (wanted === "cut") return row[CUT] === 1;
  if (wanted === "unread") return row[ANSWER] === "";
  return !wanted || state(row) === wanted;
}

async function filter() {
  const mine = ++scan, words = $("search").value.trim().toLowerCase();
  const rows = index.filter(passes);
  page = 0;
  if (!words) {
    shown = rows;
    list();
    return;
  }
  shown = [];
  list();
  for (let i = 0; i < rows.length; i++) {
    const row = rows[i], records = await chunk(row[CHUNK]);
    if (mine !== scan) return;
    if (JSON.stringify(Object.values(records[row[PLACE]])).toLowerCase().includes(escaped(words))) shown.push(row);
    if (i % 200 === 199) {
      list(`, searched ${Math.round((100 * i) / rows.length)} %`);
      await new Promise((done) => setTimeout(done));
      if (mine !== scan) return;
    }
  }
  list();
}

const escaped = (words) => JSON.stringify(words).slice(1, -1);

function list(note = "") {
  const pages = Math.max(1, Math.ceil(shown.length / PAGE));
  page = Math.min(page, pages - 1);
  $("count").textContent = `${shown.length} of ${index.length} answers${note}`;
  $("page").textContent = `${page + 1} of ${pages}`;
  $("previous").disabled = page === 0;
  $("next").disabled = page === pages - 1;
  const items = shown.slice(page * PAGE, (page + 1) * PAGE).map((row, i) => {
    const item = make("li", undefined, row[CUT] ? "cut" : state(row));
    item.append(make("div", row[ANSWER] || "(no answer read)"));
    item.append(make("div", `${row[SAMPLE]} · ${row[EFFORT]}${row[REPEAT] ? " · repeat " + row[REPEAT] : ""} · target ${row[TARGET]}`, "soft"));
    item.addEventListener("click", () => open(page * PAGE + i));
    if (page * PAGE + i === picked && current === row) item.classList.add("picked");
    return item;
  });
  $("list").replaceChildren(...items);
}

let current = null;

async function open(number) {
  if (number < 0 || number >= shown.length) return;
  picked = number;
  current = shown[number];
  page = Math.floor(number / PAGE);
  const row = current, records = await chunk(row[CHUNK]);
  if (row !== current) return;
  list();
  const item = $("list").children[number % PAGE];
  if (item) item.scrollIntoView({ block: "nearest" });
  $("sample").replaceChildren(...detail(records[row[PLACE]], row));
  $("sample").scrollTop = 0;
}

function detail(record, row) {
  const parts = [make("h2", `${record.task} · ${record.sample}`)];
  const badges = make("p");
  badges.append(make("span", `${state(row)}, score ${record.score}`, "badge " + state(row)));
  if (row[CUT]) badges.append(make("span", "cut: the token limit was reached", "badge cut"));
  if (record.status !== "answered") badges.append(make("span", record.status, "badge wrong"));
  parts.push(badges);
  const usage = record.usage;
  const facts = make("dl");
  const add = (name, value) => {
    if (value !== null && value !== undefined && value !== "") facts.append(make("dt", name), make("dd", say(value)));
  };
  add("target", record.target);
  add("answer read", record.answer === null ? "(none)" : record.answer);
  Object.entries(record.detail).forEach(([name, value]) => add(name, value));
  add("effort", record.effort);
  add("repeat", record.repeat);
  add("group", record.group);
  add("tokens", `${usage.input} in (${usage.cached} cached), ${usage.output} out (${usage.reasoning} reasoning)`);
  add("seconds", record.seconds);
  parts.push(facts);
  record.exchanges.forEach((exchange, i) => parts.push(...conversation(exchange, i, record.exchanges.length)));
  const question = make("details");
  question.append(make("summary", "question as data"), make("pre", say(record.question)));
  parts.push(question);
  return parts;
}

function conversation(exchange, i, count) {
  const parts = [];
  if (count > 1) parts.push(make("h2", `Request ${i + 1} of ${count}`));
  if (exchange.tools) parts.push(folded(`${exchange.tools.length} tools`, say(exchange.tools)));
  if (exchange.fields) parts.push(folded("fields of this request", say(exchange.fields)));
  for (const message of exchange.messages) {
    if (i > 0 && message.role === "assistant") continue;
    parts.push(make("h2", message.role));
    if (message.reasoning) parts.push(folded("reasoning", message.reasoning));
    if (message.content) parts.push(make("pre", say(message.content)));
    if (message.tool_calls) parts.push(make("pre", say(message.tool_calls)));
  }
  const reply = exchange.reply;
  if (!reply) return [...parts, make("p", "(no answer)", "soft")];
  if (reply.reasoning) {
    const more = folded("reasoning", reply.reasoning);
    more.open = true;
    parts.push(make("h2", "reasoning"), more);
  }
  parts.push(make("h2", "answer"), make("pre", reply.text || "(empty)", "answer"));
  if (reply.tool_calls) {
    for (const call of reply.tool_calls) parts.push(make("pre", `${call.name}(${call.arguments})`));
  }
  return parts;
}

function folded(name, text) {
  const more = make("details");
  more.append(make("summary", name), make("pre", text));
  return more;
}

function listen() {
  let wait = 0;
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  ["by-task", "by-group", "by-state"].forEach((id) => $(id).addEventListener("change", filter));
  $("search").addEventListener("input", () => {
    clearTimeout(wait);
    wait = setTimeout(filter, 250);
  });
  $("previous").addEventListener("click", () => { page--; list(); });
  $("next").addEventListener("click", () => { page++; list(); });
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "j") open(picked + 1);
    if (event.key === "k") open(picked - 1);
  });
}

async function start() {
  const head = await unpack("head");
  index = await unpack("index");
  results(head);
  options("by-task", index.map(taskOf));
  options("by-group", index.map((row) => row[GROUP]).filter(Boolean));
  if ($("by-group").options.length < 2) $("by-group").parentElement.hidden = true;
  listen();
  await filter();
  document.body.dataset.ready = "yes";
}

start().catch((error) => { $("count").textContent = "The page's data cannot be read: " + error; });
