// A model's Markdown as nodes. No text is ever parsed as HTML: every element is made here, from a fixed list, and
// nothing is loaded from elsewhere.

import { codeBlock, element } from "./code.js";
import { formulaNode, sourceNode } from "./formula.js";
import { parse } from "./markdown.js";

const MARK = "\u0001";  // encloses a citation's number in the text that is parsed
const LONGEST = 500_000;  // characters; the rest is shown as plain text
const DEEPEST = 60;  // elements around a word; deeper ones are left out, their words are not
const FORMULA_BUDGET = 60_000;  // characters of LaTeX in one text; further formulas are shown as their source
const TAGS = new Set(
  "p h1 h2 h3 h4 h5 h6 ul ol li blockquote hr table thead tbody tr th td strong em s br".split(" "));
// A mark of the browser tool that no citation replaced leads nowhere.
const STRAY = /【\d+†[^】\n]*】/g, STRAY_AT_END = /【\d*(?:†[^】\n]*)?$/;

// Returns the rendered text. A citation is {start_index, end_index, url, title}, as in the API's annotations.
export function renderMarkdown(text, { citations = [] } = {}) {
  const source = marked(text, citations);
  const fragment = new Builder(citations, source.notes).build(parse(source.text.slice(0, LONGEST)));
  if (source.text.length > LONGEST) fragment.append(plain(source.restored(source.text.slice(LONGEST))));
  return fragment;
}

// Shows a text that grows. Finished blocks stay in the page; only the last one is drawn again.
export class MarkdownView {
  constructor(node) {
    this.node = node;
    this.node.classList.add("rendered");
    this.reset();
  }

  reset() {
    this.node.replaceChildren();
    this.kept = "";  // the source of the blocks that are finished
    this.tail = [];  // the nodes of the rest
    this.references = {};
    this.budget = { formulas: FORMULA_BUDGET };
    this.next = 0;
  }

  // Draws the text. Returns false if it is too early for that: drawing takes a fifth of the time at most, so call
  // again at the next frame. A text that is done is always drawn.
  update(text, { citations = [], done = false } = {}) {
    const begun = performance.now();
    if (!done && begun < this.next) return false;
    const source = marked(text, citations);
    const changed = !source.text.startsWith(this.kept);
    // A link may be defined after the block that uses it.
    if (changed || (done && this.kept && Object.keys(this.references).length)) this.reset();
    this.draw(source, citations, done);
    const end = performance.now();
    this.next = end + 4 * (end - begun);
    return true;
  }

  draw(source, citations, done) {
    const rest = source.text.slice(this.kept.length);
    const limit = Math.max(0, LONGEST - this.kept.length);
    const text = done ? rest.slice(0, limit) : withoutHalfLine(rest.slice(0, limit));
    const tokens = parse(text, { partial: !done, references: this.references });
    const { place, offset } = done ? { place: tokens.length, offset: text.length } : finished(tokens, text);
    const builder = new Builder(citations, source.notes, { budget: this.budget, partial: !done });
    builder.reuse(this.tail);
    for (const node of this.tail) node.remove();
    this.node.append(builder.build(tokens.slice(0, place)));
    const spent = { ...this.budget };
    const tail = builder.build(tokens.slice(place));
    this.budget.formulas = spent.formulas;  // the tail is drawn again
    if (rest.length > limit) tail.append(plain(source.restored(rest.slice(limit))));
    this.tail = [...tail.childNodes];
    this.node.append(tail);
    this.kept += text.slice(0, offset);
  }
}

// Returns the place of the first token, and the offset of the text, that what follows can still change: the last
// block that begins with a whole line.
function finished(tokens, text) {
  const starts = [0];
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) starts.push(at + 1);
  let found = { place: 0, offset: 0 };
  tokens.forEach((token, place) => {
    if (token.level === 0 && token.nesting >= 0 && token.map && token.map[0] < starts.length - 1)
      found = { place, offset: starts[token.map[0]] };
  });
  return found;
}

// Partial text without a last line that would show as something else than what it becomes: a heading's underline
// that becomes a list, a fence that is not whole.
const withoutHalfLine = text => text.replace(/\n[ \t]*(?:-+|=+|`{1,2}|~{1,2})[ \t]*$/, "\n");

// Returns the text with a mark in the place of each citation. Offsets count characters, not UTF-16 units.
function marked(text, citations) {
  const notes = new Map();
  const clean = part => part.replaceAll(MARK, "").replace(/\r\n?/g, "\n");
  const sorted = citations.map((note, number) => ({ ...note, number })).sort((a, b) => a.start_index - b.start_index);
  let result = "", unit = 0, character = 0;
  const upTo = offset => {
    const from = unit;
    for (; character < offset && unit < text.length; character++) unit += text.codePointAt(unit) > 0xffff ? 2 : 1;
    return text.slice(from, unit);
  };
  for (const { start_index: start, end_index: end, number } of sorted) {
    if (!(start >= character && end >= start)) continue;
    result += clean(upTo(start));
    const original = clean(upTo(end));
    notes.set(String(number), original);
    result += MARK + number + MARK;
  }
  const restored = part => part.replace(/\u0001(\d+)\u0001/g, (_, number) => notes.get(number) ?? "").replaceAll(MARK, "");
  return { text: result + clean(text.slice(unit)), notes: { restored }, restored };
}

const plain = text => element("div", "plain", text);

class Builder {
  constructor(citations, notes, { budget = { formulas: FORMULA_BUDGET }, partial = false } = {}) {
    this.citations = citations;
    this.restored = notes.restored;
    this.budget = budget;
    this.partial = partial;
    this.figures = [];
    this.formulas = new Map();
  }

  // Takes over what need not be made again from the nodes of an earlier state.
  reuse(nodes) {
    for (const node of nodes) {
      if (node.nodeType !== Node.ELEMENT_NODE) continue;
      for (const each of [node, ...node.querySelectorAll("figure.code, .formula")]) {
        if (each.matches("figure.code")) this.figures.push(each);
        else if (each.matches(".formula")) this.formulas.set(each.dataset.source, each);
      }
    }
  }

  build(tokens) {
    const fragment = document.createDocumentFragment();
    this.fill(fragment, tokens, 0);
    return fragment;
  }

  fill(parent, tokens, depth) {
    const stack = [parent];
    for (const token of tokens) {
      if (token.nesting < 0) {
        stack.pop();
        continue;
      }
      const here = stack.at(-1);
      if (token.nesting > 0) stack.push(depth + stack.length > DEEPEST ? here : this.open(here, token));
      else if (token.type === "inline") this.fill(here, token.children, depth + stack.length);
      else this.leaf(here, token);
    }
  }

  // Appends the element of a token that has content, and returns the node that gets it.
  open(here, token) {
    if (token.hidden) return here;  // the paragraphs of a tight list
    if (token.type === "link_open") return here.appendChild(anchor(token.attrGet("href"), token.attrGet("title")));
    const heading = /^h([1-6])$/.exec(token.tag);
    if (heading) {  // the page has headings above the answer's
      const node = element(`h${Math.min(6, Number(heading[1]) + 2)}`, `level-${heading[1]}`);
      return here.appendChild(node);
    }
    const node = element(TAGS.has(token.tag) ? token.tag : "span");
    const align = /^text-align:(left|center|right)$/.exec(token.attrGet("style") ?? "");
    if (align) node.className = `align-${align[1]}`;
    if (token.attrGet("start") !== null) node.start = Number(token.attrGet("start"));
    if (token.meta?.task) node.className = "task";
    if (token.tag !== "table") return here.appendChild(node);
    const box = here.appendChild(element("div", "table"));
    box.tabIndex = 0;  // a keyboard can scroll it
    return box.appendChild(node);
  }

  leaf(here, token) {
    const { type, content } = token;
    if (type === "text" || type === "text_special") this.text(here, content);
    else if (type === "code_inline") this.text(here.appendChild(element("code")), content);
    else if (type === "fence" || type === "code_block") here.append(this.code(token));
    else if (type === "formula" || type === "formula_block") here.append(this.formula(token));
    else if (type === "image") here.append(image(token));
    else if (type === "softbreak") here.append("\n");
    else if (type === "checkbox") here.append(checkbox(token.meta.checked));
    else if (type === "plain") here.append(plain(this.restored(content)));
    else if (TAGS.has(token.tag)) here.append(element(token.tag));
    else this.text(here, content);
  }

  text(here, content) {
    const visible = here.tagName === "CODE" ? content : content.replace(STRAY, "");
    const shown = this.partial && here.tagName !== "CODE" ? visible.replace(STRAY_AT_END, "") : visible;
    shown.split(/\u0001(\d+)\u0001/).forEach((part, place) => {
      if (place % 2 === 0) here.append(part.replaceAll(MARK, ""));
      else if (this.citations[Number(part)]) here.append(citation(this.citations[Number(part)]));
    });
  }

  code(token) {
    const language = token.type === "fence" ? token.info.trim().split(/\s/)[0] : "";
    return codeBlock(this.restored(token.content), this.restored(language), this.figures.shift());
  }

  formula(token) {
    const source = this.restored(token.meta.source);
    if (token.meta.pending) return sourceNode(source);
    const known = this.formulas.get(source);
    this.budget.formulas -= token.content.length;
    if (this.budget.formulas < 0) return sourceNode(source, "There are too many formulas.");
    if (known) {
      this.formulas.delete(source);
      return known;
    }
    const node = formulaNode(this.restored(token.content), { ...token.meta, source });
    node.dataset.source = source;
    return node;
  }
}

// A link in a new tab, or a mark that shows an address which a browser should not open from here.
function anchor(address, title, className = "") {
  const open = /^(?:https?:\/\/|mailto:)/i.test(address);
  const node = element(open ? "a" : "span", open ? className : `${className} address`.trim());
  if (open) Object.assign(node, { href: address, rel: "noreferrer noopener", target: "_blank" });
  else node.dataset.address = address;
  node.title = title ?? (open ? "" : address);
  return node;
}

// Images are not loaded: who serves them would learn of the reader.
function image(token) {
  const node = anchor(token.attrGet("src").replaceAll(MARK, ""), token.attrGet("title"), "image");
  node.append(words(token.children).replaceAll(MARK, "") || "image");
  return node;
}

const words = tokens =>
  tokens.map(token => (token.type === "softbreak" ? "\n" : token.children ? words(token.children) : token.content)).join("");

function checkbox(checked) {
  const node = element("input");
  Object.assign(node, { type: "checkbox", checked, disabled: true });
  node.setAttribute("aria-label", checked ? "done" : "to do");
  return node;
}

function citation(note) {
  const url = note.url || "", host = url.replace(/^https?:\/\/(www\.)?/i, "").split("/")[0];
  const node = anchor(url, [note.title, url].filter(Boolean).join("\n"), "cite");
  node.append(host || "source");
  return node;
}
