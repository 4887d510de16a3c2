// The user's settings, kept in this browser, and the drawer that shows them.

import { root } from "./api.js";
import { $, make } from "./dom.js";

const KEPT = "chorale-settings" + root;
const NUMBERS = ["temperature", "top_p", "max_output_tokens"];

export const settings = { instructions: "", effort: "medium", temperature: null, top_p: null, max_output_tokens: null, tools: [] };
let tools = [];

try { Object.assign(settings, JSON.parse(localStorage.getItem(KEPT))); } catch { /* the defaults remain */ }

function keep() {
  try { localStorage.setItem(KEPT, JSON.stringify(settings)); } catch { /* they last as long as the page */ }
}

// The tools that the server has and the user has turned on.
export const chosenTools = () => tools.filter(tool => settings.tools.includes(tool.id));

// The fields of a request that come from the settings.
export function requestFields() {
  const fields = { reasoning: { effort: settings.effort } };
  if (settings.instructions.trim()) fields.instructions = settings.instructions;
  for (const name of NUMBERS) if (settings[name] !== null) fields[name] = settings[name];
  const chosen = chosenTools();
  if (chosen.length) fields.tools = chosen.map(tool => tool.tool);
  return fields;
}

export function setTools(found) {
  if (JSON.stringify(found) === JSON.stringify(tools)) return;
  tools = found;
  for (const [box, make] of [[$("tools"), pill], [$("set-tools"), row]]) {
    for (const old of box.querySelectorAll("label")) old.remove();
    box.append(...tools.map(make));
  }
  $("set-tools").hidden = !tools.length;
  draw();
}

export function chooseTools(ids) {
  settings.tools = ids;
  keep();
  draw();
}

function draw() {
  for (const box of document.querySelectorAll(".tool-toggle")) box.checked = settings.tools.includes(box.value);
  $("effort").value = $("set-effort").value = settings.effort;
  $("set-instructions").value = settings.instructions;
  for (const name of NUMBERS) $("set-" + name).value = settings[name] ?? "";
}

function toggle(tool) {
  return make("input", { type: "checkbox", class: "tool-toggle", value: tool.id, onchange: event => {
    const others = settings.tools.filter(id => id !== tool.id);
    chooseTools(event.target.checked ? [...others, tool.id] : others);
  } });
}

const pill = tool => make("label", { class: "pill", title: tool.about }, toggle(tool), make("span", {}, tool.name));
const row = tool => make("label", { class: "check" }, toggle(tool), make("span", {}, tool.name, make("small", {}, tool.about)));

function readNumber(input, name) {
  const valid = input.checkValidity();
  input.setAttribute("aria-invalid", String(!valid));
  if (valid) settings[name] = input.value === "" ? null : Number(input.value);
  const wrong = NUMBERS.map(each => $("set-" + each)).find(each => !each.checkValidity());
  $("settings-note").textContent = wrong ? wrong.validationMessage
    : "An empty field leaves the choice to the server. Settings apply to the next answer.";
  $("settings-note").classList.toggle("error", Boolean(wrong));
  keep();
}

export function start() {
  draw();
  const effort = event => { settings.effort = event.target.value; keep(); draw(); };
  $("effort").addEventListener("change", effort);
  $("set-effort").addEventListener("change", effort);
  $("set-instructions").addEventListener("input", event => { settings.instructions = event.target.value; keep(); });
  for (const name of NUMBERS) $("set-" + name).addEventListener("input", event => readNumber(event.target, name));
  $("open-settings").addEventListener("click", () => { draw(); $("settings").showModal(); });
  $("settings").addEventListener("click", event => { if (event.target === $("settings")) $("settings").close(); });
  // Enter in a field would press the first button of the form, which closes the drawer.
  $("settings").addEventListener("keydown", event => { if (event.key === "Enter" && event.target.tagName === "INPUT") event.preventDefault(); });
}
