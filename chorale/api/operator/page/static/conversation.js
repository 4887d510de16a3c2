// A conversation as a tree of messages, and as input of the Responses API. Nothing here touches the page.
//
// A message of the user: {role: "user", text, files: [{name, size, data}]}.
// An answer: {role: "assistant", items, status, response, sequence, error, ...}: `items` are output items of the
// API, `sequence` is the number of the last event in them. `base` has the items before "Continue" was pressed.
// `status`: "running", "completed", "incomplete" (token limit), "stopped", "failed".

export class Tree {
  constructor(conversation, messages) {
    this.conversation = conversation;
    this.messages = new Map(messages.map(message => [message.id, message]));
  }

  children(parent) {
    return [...this.messages.values()].filter(message => message.parent === parent).sort((a, b) => a.created - b.created);
  }

  // The messages that are shown, from the first to the last. After a message that has no chosen child, the newest.
  thread() {
    const found = [], seen = new Set();
    for (let parent = ""; !seen.has(parent);) {
      seen.add(parent);
      const children = this.children(parent);
      if (!children.length) break;
      const next = children.find(child => child.id === this.conversation.chosen[parent]) || children.at(-1);
      found.push(next);
      parent = next.id;
    }
    return found;
  }

  // The versions of a message: its siblings and itself.
  versions(message) { return this.children(message.parent); }

  add(message) {
    message.created = Math.max(Date.now(), ...this.children(message.parent).map(sibling => sibling.created + 1));
    this.messages.set(message.id, message);
    this.choose(message);
  }

  remove(message) {
    this.messages.delete(message.id);
    if (this.conversation.chosen[message.parent] === message.id) delete this.conversation.chosen[message.parent];
  }

  choose(message) { this.conversation.chosen[message.parent] = message.id; }
}

export function titleOf(text, files) {
  const line = text.trim().split("\n")[0].trim() || (files[0] && files[0].name) || "New chat";
  const characters = Array.from(line);
  return characters.length > 60 ? characters.slice(0, 59).join("").trimEnd() + "…" : line;
}

// ------------------------------------------------------------------ answers

// Returns all items of an answer; text that was continued is one message.
export function itemsOf(answer) {
  if (!answer.base) return answer.items;
  const before = answer.base.at(-1), after = answer.items[0];
  if (!answer.joins || !before || !after || before.type !== after.type) return [...answer.base, ...answer.items];
  return [...answer.base.slice(0, -1), joined(before, after), ...answer.items.slice(1)];
}

function joined(before, after) {
  const first = before.content[0] || {}, second = after.content[0] || {};
  const offset = Array.from(first.text || "").length;
  const moved = (second.annotations || []).map(note => ({
    ...note, start_index: note.start_index + offset, end_index: note.end_index + offset,
  }));
  const { id, ...kept } = before;  // the server has stored neither half as this message
  return { ...kept, key: id, status: after.status, content: [{
    ...second, type: second.type || first.type, text: (first.text || "") + (second.text || ""),
    ...(first.annotations ? { annotations: [...first.annotations, ...moved] } : {}),
  }] };
}

export const textOf = answer => itemsOf(answer).filter(item => item.type === "message")
  .map(item => (item.content || []).map(part => part.text || part.refusal || "").join("")).filter(Boolean).join("\n\n");

// Adds an event of the stream to an answer. Returns whether the response has ended.
export function fold(answer, event) {
  if (Number.isInteger(event.sequence_number)) answer.sequence = event.sequence_number;
  const item = answer.items[event.output_index];
  const part = item && Number.isInteger(event.content_index) ? item.content[event.content_index] ??= { text: "" } : null;
  switch (event.type) {
    case "response.created": case "response.queued": case "response.in_progress":
      answer.response = event.response.id;
      break;
    case "response.output_item.added":
      answer.items[event.output_index] = { content: [], ...event.item, status: "in_progress" };
      break;
    case "response.content_part.added":
      item.content[event.content_index] = event.part;
      break;
    case "response.reasoning_text.delta": case "response.output_text.delta":
      part.text += event.delta;
      break;
    case "response.output_text.annotation.added":
      (part.annotations ??= []).push(event.annotation);
      break;
    case "response.code_interpreter_call_code.delta":
      item.code = (item.code || "") + event.delta;
      break;
    case "response.mcp_call_arguments.delta": case "response.function_call_arguments.delta":
      item.arguments = (item.arguments || "") + event.delta;
      break;
    case "response.custom_tool_call_input.delta":
      item.input = (item.input || "") + event.delta;
      break;
    case "response.code_interpreter_call.interpreting":
      item.status = "interpreting";
      break;
    case "response.output_item.done":
      answer.items[event.output_index] = event.item;
      break;
    case "response.completed": case "response.incomplete": case "response.failed":
      finish(answer, event.response);
      return true;
  }
  return false;
}

function finish(answer, response) {
  if (response.output.length >= answer.items.length) answer.items = response.output;
  answer.status = { completed: "completed", failed: "failed", cancelled: "stopped" }[response.status] || "incomplete";
  answer.usage = response.usage || null;
  answer.metrics = response.metrics || null;
  answer.stored = response.store !== false;
  if (response.status === "failed") answer.error = (response.error || {}).message || "The response failed.";
}

// What the engine measured, in words. Its time includes tools, so an answer that used one has no speed.
export function statistics(answer) {
  const { usage, metrics } = answer, words = [];
  if (usage && !answer.base) words.push(usage.output_tokens + (usage.output_tokens === 1 ? " token" : " tokens"));
  if (!metrics || answer.base) return words;
  const usedTools = answer.items.some(item => !["message", "reasoning"].includes(item.type));
  if (metrics.mean_itl_ms > 0 && metrics.generation_time_ms >= 500 && !usedTools) {
    const speed = 1000 / metrics.mean_itl_ms;
    words.push((speed < 10 ? speed.toFixed(1) : speed.toFixed(0)) + " tokens/s");
  }
  const first = metrics.queue_time_ms + metrics.time_to_first_token_ms;
  if (first >= 0) words.push("first token after " + (first < 1000 ? Math.round(first) + " ms" : (first / 1000).toFixed(1) + " s"));
  return words;
}

// ------------------------------------------------------------------ input of the API

const FIELDS = {
  message: ["id", "role", "status", "phase"],
  reasoning: ["id", "status"],
  web_search_call: ["id", "status", "action", "results"],
  code_interpreter_call: ["id", "status", "code", "container_id", "outputs"],
  mcp_call: ["id", "status", "server_label", "name", "arguments", "output", "error", "approval_request_id"],
  mcp_list_tools: ["id", "server_label", "tools", "error"],
};
const PARTS = { output_text: ["text", "annotations"], reasoning_text: ["text"], refusal: ["refusal"] };

const picked = (value, names) => Object.fromEntries(names.filter(name => value[name] !== undefined && value[name] !== null)
  .map(name => [name, value[name]]));

// The history is sent as items: the server replays those that it has stored from their exact tokens, by their
// id, and renders the others from their fields. So a conversation survives a restart and the end of the store.
export function toInput(thread) {
  return thread.flatMap(message => message.role === "user" ? [userItem(message)] : answerItems(message));
}

function userItem({ text, files = [] }) {
  const parts = files.map(file => ({ type: "input_file", filename: file.name, file_data: file.data }));
  if (text) parts.push({ type: "input_text", text });
  return { type: "message", role: "user", content: files.length ? parts : text };
}

function answerItems(answer) {
  return itemsOf(answer).filter(item => FIELDS[item.type]).map(item => {
    const kept = { type: item.type, ...picked(item, FIELDS[item.type]) };
    if (kept.status && !["completed", "failed"].includes(kept.status)) kept.status = "incomplete";
    if (item.type === "reasoning") kept.summary = [];
    if (item.type === "message" || item.type === "reasoning")
      kept.content = (item.content || []).filter(part => PARTS[part.type]).map(part => ({ type: part.type, ...picked(part, PARTS[part.type]) }));
    return kept;
  });
}
