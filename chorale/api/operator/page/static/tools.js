// How calls of tools are shown: a title, and what the tool was given and what it returned.

import { make, outside } from "./dom.js";

const TITLES = {
  web_search_call(item, done) {
    const { type, query, url, pattern } = item.action || {};
    if (type === "open_page") return (done ? "Opened " : "Opening ") + (url || "a page");
    if (type === "find_in_page") return (done ? "Looked for " : "Looking for ") + `“${pattern || ""}”`;
    return (done ? "Searched" : "Searching") + (query ? ": " + query : "");
  },
  code_interpreter_call: (item, done) => done ? "Ran Python" : item.status === "interpreting" ? "Running Python" : "Writing Python",
  mcp_call: item => item.server_label + ": " + item.name,
  mcp_list_tools: (item, done) => item.server_label + ": " + (done ? (item.tools || []).length + " tools" : "its tools"),
  function_call: item => "Call " + item.name,
  custom_tool_call: item => "Call " + item.name,
};

export const TOOL_ICONS = { web_search_call: "globe", code_interpreter_call: "code" };

// `state`: "running", "done", "failed" or "cut".
export function toolTitle(item, state) {
  const title = (TITLES[item.type] || (() => item.type.replaceAll("_", " ")))(item, state === "done");
  return title + { running: "…", done: "", failed: " (failed)", cut: " (cut off)" }[state];
}

export function toolBody(item) {
  const blocks = (item.type === "web_search_call" ? searchBody : callBody)(item);
  if (item.error) blocks.push(make("p", { class: "error" }, item.error.message || JSON.stringify(item.error)));
  return blocks;
}

function searchBody(item) {
  const action = item.action || {}, found = item.results || action.sources || [];
  if (action.type !== "search") return action.url ? [make("p", {}, outside(action.url, action.url))] : [];
  if (item.status === "completed" && !found.length) return [make("p", {}, "Nothing was found.")];
  return found.map(source => make("div", { class: "found" }, outside(source.title || source.url, source.url), make("p", {}, source.snippet)));
}

function callBody(item) {
  const asked = item.code || item.arguments || item.input;
  const blocks = [...block(null, asked)];
  if (item.type === "code_interpreter_call" && item.status === "completed")
    blocks.push(...block("Output", (item.outputs || []).map(output => output.logs || output.url || "").join("") || "(none)"));
  blocks.push(...block("Output", item.output));
  if (item.type === "mcp_list_tools") blocks.push(...block(null, (item.tools || []).map(tool => tool.name).join("\n")));
  return blocks;
}

function block(title, text) {
  if (!text) return [];
  const shown = make("pre", { tabindex: "0" }, typeof text === "string" ? text : JSON.stringify(text, null, 1));
  return title ? [make("p", { class: "label" }, title), shown] : [shown];
}
