// The messages of a conversation on the page.

import { announce, copyText, icon, iconButton, make } from "./dom.js";
import { itemsOf, statistics, textOf } from "./conversation.js";
import { MarkdownView } from "./render.js";
import { TOOL_ICONS, toolBody, toolTitle } from "./tools.js";

// `hooks`: edit(message, text, files), regenerate(answer), continue(answer), choose(message), isAtEnd(), toEnd().
export class Turn {
  constructor(message, hooks) {
    this.message = message;
    this.hooks = hooks;
    this.parts = new Map();
    this.content = make("div", { class: "content" });
    this.foot = make("div", { class: "foot-line" });
    this.note = make("div", { class: "state-line" });
    const isUser = message.role === "user";
    this.node = make("article", {
      class: "turn " + message.role, "aria-label": isUser ? "Your message" : "Answer", "data-id": message.id,
    }, this.content, this.note, this.foot);
    if (isUser) this.#drawUser();
  }

  // ---------------------------------------------------------------- messages of the user

  #drawUser() {
    const { text, files = [] } = this.message;
    this.content.replaceChildren();
    if (files.length) this.content.append(make("ul", { class: "files", "aria-label": "Attached files" },
      ...files.map(file => make("li", {}, icon("file"), file.name))));
    if (text) this.content.append(make("div", { class: "bubble" }, text));
  }

  #edit() {
    const box = make("textarea", { "aria-label": "Edit the message", rows: Math.min(12, this.message.text.split("\n").length + 1) });
    box.value = this.message.text;
    let kept = this.message.files || [];
    const list = make("ul", { class: "files", "aria-label": "Attached files" }, ...kept.map(file => {
      const chip = make("li", {}, icon("file"), file.name, iconButton("close", "Remove " + file.name, () => {
        kept = kept.filter(each => each !== file);
        chip.remove();
        box.focus();
      }));
      return chip;
    }));
    const cancel = () => { this.#drawUser(); this.foot.hidden = false; this.foot.querySelector("button").focus(); };
    const send = () => { if (box.value.trim() || kept.length) this.hooks.edit(this.message, box.value.trim(), kept); };
    box.addEventListener("keydown", event => {
      if (event.key === "Escape") cancel();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    });
    this.content.replaceChildren(make("div", { class: "editor" }, list, box, make("div", { class: "row end" },
      make("button", { type: "button", onclick: cancel }, "Cancel"),
      make("button", { type: "button", class: "solid", onclick: send }, "Send"))));
    this.foot.hidden = true;
    box.focus();
  }

  // ---------------------------------------------------------------- answers

  // Draws what has changed, at most once a frame.
  changed() {
    this.scheduled ??= requestAnimationFrame(() => this.drawNow());
  }

  drawNow() {
    if (this.scheduled) cancelAnimationFrame(this.scheduled);
    this.scheduled = null;
    const stuck = this.hooks.isAtEnd();
    for (const [place, item] of itemsOf(this.message).entries()) this.#drawItem(item, place);
    if (stuck) this.hooks.toEnd();
  }

  #drawItem(item, place) {
    let part = this.parts.get(place);
    if (part && part.type !== item.type) { part.node.remove(); part = null; }
    if (!part) {
      part = item.type === "message" ? { node: make("div", { class: "answer" }) } : this.#fold(item);
      part.type = item.type;
      if (item.type === "message") part.view = new MarkdownView(part.node);
      this.parts.set(place, part);
      this.content.append(part.node);
    }
    if (item.type === "message") this.#drawText(part, item);
    else if (item.type === "reasoning") this.#drawThought(part, item);
    else this.#drawTool(part, item);
  }

  #fold(item) {
    const title = make("span", { class: "title" });
    const body = make("div", { class: "body" });
    const picture = icon(item.type === "reasoning" ? "bulb" : TOOL_ICONS[item.type] || "plug");
    const node = make("details", { class: "fold " + (item.type === "reasoning" ? "thought" : "tool") },
      make("summary", {}, picture, title, icon("right")), body);
    return { node, title, body };
  }

  #drawText(part, item) {
    const text = (item.content || []).map(each => each.text || each.refusal || "").join("");
    const citations = (item.content || []).flatMap(each => each.annotations || []).filter(note => note.type === "url_citation");
    const done = !this.#isRunning(item), key = [text.length, citations.length, done].join();
    if (part.key === key) return;
    if (part.view.update(text, { citations, done })) part.key = key;
    else this.changed();  // it is too early to draw again
  }

  #drawThought(part, item) {
    const text = (item.content || []).map(each => each.text).join("\n\n");
    const running = this.#isRunning(item);
    if (part.text !== text) part.body.textContent = part.text = text;
    if (part.running !== running) part.node.open = running;
    part.running = running;
    const seconds = (this.message.thinking || {})[item.id];
    part.title.textContent = running ? "Thinking…" : item.status !== "completed" ? "Thought (cut off)"
      : !(seconds >= 0.1) ? "Thought" : "Thought for " + seconds.toFixed(1) + " s";
    part.node.classList.toggle("running", running);
  }

  #drawTool(part, item) {
    const running = this.#isRunning(item);
    const state = running ? "running" : item.status === "failed" ? "failed" : item.status === "completed" || !item.status ? "done" : "cut";
    const key = JSON.stringify([item, state]);
    if (part.key === key) return;
    part.key = key;
    part.title.textContent = toolTitle(item, state);
    part.body.replaceChildren(...toolBody(item));
    part.node.classList.toggle("running", running);
    part.node.classList.toggle("broken", state === "failed");
  }

  #isRunning(item) {
    return this.message.status === "running" && !["completed", "failed", "incomplete"].includes(item.status);
  }

  // Draws what stands below a message: why it waits or ended, buttons, the branches, the engine's figures.
  drawState(versions, { isLast, waiting, busy }) {
    const { message } = this, stuck = this.hooks.isAtEnd();
    if (message.role === "assistant") this.drawNow();
    this.note.replaceChildren(...this.#notes(waiting));
    const buttons = message.role === "user" ? this.#userButtons(busy) : this.#answerButtons(isLast, busy);
    this.foot.replaceChildren(...this.#branches(versions, busy), ...buttons);
    if (message.role === "assistant" && message.status !== "running") {
      const words = statistics(message);
      if (words.length) this.foot.append(make("span", { class: "stats" }, words.join(" · ")));
    }
    this.foot.hidden = message.status === "running";
    if (stuck) this.hooks.toEnd();
  }

  #notes(waiting) {
    const { message } = this;
    if (message.role === "user") return [];
    if (waiting) return [make("p", { class: "waiting" }, waiting)];
    if (message.status === "running")
      return itemsOf(message).length ? [] : [make("p", { class: "dots", "aria-label": "Waiting for the answer" }, make("span"), make("span"), make("span"))];
    if (message.status === "failed") return [make("p", { class: "error", role: "alert" }, message.error || "The answer failed.")];
    if (message.status === "stopped") return [make("p", { class: "note" }, "Stopped.")];
    if (message.status === "incomplete") return [make("p", { class: "note" }, "The answer reached the limit of tokens.")];
    return [];
  }

  #userButtons(busy) {
    const { message } = this;
    return [
      iconButton("pencil", "Edit the message", () => this.#edit(), { disabled: busy }),
      message.text ? this.#copyButton("Copy the message", () => message.text) : null,
    ].filter(Boolean);
  }

  #answerButtons(isLast, busy) {
    const { message } = this, found = [];
    if (textOf(message)) found.push(this.#copyButton("Copy the answer", () => textOf(message)));
    const failed = message.status === "failed";
    if (failed) found.push(make("button", { type: "button", class: "retry", disabled: busy, onclick: () => this.hooks.regenerate(message) }, icon("redo"), "Retry"));
    else found.push(iconButton("redo", "Regenerate the answer", () => this.hooks.regenerate(message), { disabled: busy }));
    if (isLast && message.status !== "completed" && itemsOf(message).length)
      found.push(make("button", { type: "button", class: "continue", disabled: busy, onclick: () => this.hooks.continue(message) }, icon("play"), "Continue"));
    return found;
  }

  #copyButton(label, text) {
    const button = iconButton("copy", label, async () => {
      await copyText(text());
      button.replaceChildren(icon("check"));
      announce("Copied");
      setTimeout(() => button.replaceChildren(icon("copy")), 1500);
    });
    return button;
  }

  #branches(versions, busy) {
    if (versions.length < 2) return [];
    const place = versions.findIndex(version => version.id === this.message.id);
    const go = step => this.hooks.choose(versions[place + step]);
    return [make("span", { class: "branches", role: "group", "aria-label": "Versions" },
      iconButton("left", "Previous version", () => go(-1), { disabled: busy || place === 0 }),
      make("span", { class: "count" }, `${place + 1}/${versions.length}`),
      iconButton("right", "Next version", () => go(1), { disabled: busy || place === versions.length - 1 }))];
  }
}
