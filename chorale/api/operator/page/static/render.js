// A model's Markdown as nodes. No text is ever parsed as HTML: every element is made here, from a fixed list, and
// nothing is loaded from elsewhere.

import { codeBlock, element } from "./code.js";
import { formulaNode, sourceNode } from "./formula.js";
import { languageOf, parse } from "./markdown.js";

const MARK = "\u0001";  // encloses a citation's number in the text that is parsed
const LONGEST = 500_000;  // characters; the rest is shown as plain text
const DEEPEST = 60;  // elements around a word; deeper ones are left out, their words are not
const COLOUR_TIME = 300;  // milliseconds of one drawing for the colours of code
const MOST_ELEMENTS = 40_000;  // in one text, about; what follows is shown as plain words
const TAGS = new Set(
  "p h1 h2 h3 h4 h5 h6 ul ol li blockquote hr table thead tbody tr th td strong em s br".split(" "));
// A mark of the browser tool that no citation replaced leads nowhere.
const STRAY = /【\d+†[^】\n]*】/g, STRAY_AT_END = /【\d*(?:†[^】\n]*)?$/;

// Returns the rendered text. A citation is {start_index, end_index, url, title}, as in the API's annotations.
export function renderMarkdown(text, { citations = [] } = {}) {
  const source = marked(text, citations);
  const start = source.text.slice(0, LONGEST);
  const { fragment, full } = new Builder(citations, source.restored).build(parse(start), start);
  if (full !== null || source.text.length > LONGEST)
    fragment.append(plain(source.restored(source.text.slice(full ?? LONGEST))));
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
    this.budget = MOST_ELEMENTS;
    this.full = false;  // what follows `kept` is shown as plain text
    this.next = 0;
  }

  // Draws the text. Returns false if it is too early for that: drawing takes a fifth of the time at most, so call
  // again at the next frame. A text that is done is always drawn.
  update(text, { citations = [], done = false } = {}) {
    const begun = performance.now();
    if (!done && begun < this.next) return false;
    const source = marked(text, citations);
    const changed = !source.text.startsWith(this.kept);
    if (changed) this.reset();
    const parts = this.kept !== "";
    this.draw(source, citations, done);
    if (done && parts && Object.keys(this.references).length) {  // a link may be defined after the block that uses it
      this.reset();
      this.draw(source, citations, done);
    }
    const end = performance.now();
    this.next = end + 4 * (end - begun);
    return true;
  }

  draw(source, citations, done) {
    const rest = source.text.slice(this.kept.length);
    const text = done ? rest : withoutHalfLine(rest);
    const builder = new Builder(citations, source.restored, { budget: this.budget, partial: !done, old: this.tail });
    for (const node of this.tail) node.remove();
    if (!this.full && source.text.length <= LONGEST) this.parsed(text, builder, done);
    else this.shown(document.createDocumentFragment(), 0, plain(source.restored(text)));
  }

  parsed(text, builder, done) {
    const tokens = parse(text, { partial: !done, references: this.references });
    const { place, offset } = finished(tokens, text);
    const { fragment, full, left, nodes } = builder.build(tokens, text, place);
    this.full = full !== null;
    this.kept += text.slice(0, full ?? offset);
    this.budget = left;  // the tail is drawn again
    if (this.full) fragment.append(plain(builder.restored(text.slice(full))));
    this.shown(fragment, nodes);
  }

  shown(fragment, kept, ...more) {
    fragment.append(...more);
    this.tail = [...fragment.childNodes].slice(kept);
    this.node.append(fragment);
  }
}

// Returns the place of the first token, and the offset of the text, that what follows can still change: the last
// block that begins with a whole line.
function finished(tokens, text) {
  const whole = text.split("\n").length - 1;
  const place = tokens.findLastIndex(({ level, nesting, map }) => level === 0 && nesting >= 0 && map?.[0] < whole);
  return place < 0 ? { place: 0, offset: 0 } : { place, offset: lineOffset(text, tokens[place].map[0]) };
}

function lineOffset(text, line) {
  let offset = 0;
  for (; line > 0; line--) offset = text.indexOf("\n", offset) + 1;
  return offset;
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
  const restored = part =>
    part.replace(/\u0001(\d+)\u0001/g, (_, number) => notes.get(number) ?? "").replaceAll(MARK, "");
  return { text: result + clean(text.slice(unit)), restored };
}

const plain = text => element("div", "plain", text);

class Full extends Error {}

class Builder {
  // `old` are the nodes of an earlier state, from which code and formulas are taken over.
  constructor(citations, restored, { budget = MOST_ELEMENTS, partial = false, old = [] } = {}) {
    this.citations = citations;
    this.restored = restored;
    this.budget = budget;
    this.partial = partial;
    this.clock = { left: COLOUR_TIME };
    this.figures = [];
    this.formulas = new Map();
    for (const node of old) {
      if (node.nodeType !== Node.ELEMENT_NODE) continue;
      for (const each of [node, ...node.querySelectorAll("figure.code, .formula")]) {
        if (each.matches("figure.code")) this.figures.push(each);
        else if (each.matches(".formula")) this.formulas.set(each.dataset.source, each);
      }
    }
  }

  // Returns the nodes of the tokens; how many of them belong to the tokens before `place`, and the budget that was
  // left there. `full` is the offset in the text of the first block that was too much, or null.
  build(tokens, text, place = 0) {
    const fragment = document.createDocumentFragment();
    let left = this.budget, nodes = 0, begun = 0;
    for (let at = 0; at < tokens.length; at = begun) {
      begun = at + 1;
      while (begun < tokens.length && !(tokens[begun].level === 0 && tokens[begun].nesting >= 0)) begun++;
      const block = document.createDocumentFragment();
      try {
        this.fill(block, tokens.slice(at, begun), 0);
      } catch (error) {
        if (!(error instanceof Full)) throw error;
        return { fragment, full: lineOffset(text, tokens[at].map[0]), left, nodes: fragment.childNodes.length };
      }
      fragment.append(block);
      if (begun <= place) [left, nodes] = [this.budget, fragment.childNodes.length];
    }
    return { fragment, full: null, left, nodes };
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

  spend(elements) {
    this.budget -= elements;
    if (this.budget < 0) throw new Full();
  }

  // Appends the element of a token that has content, and returns the node that gets it.
  open(here, token) {
    if (token.hidden) return here;  // the paragraphs of a tight list
    this.spend(1);
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
    this.spend(type === "text" ? 0 : 1);
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
    this.spend(10 + token.content.length / 20);
    const text = this.restored(token.content), language = this.restored(languageOf(token));
    return codeBlock(text, language, this.figures.shift(), this.clock);
  }

  formula(token) {
    const source = this.restored(token.meta.source);
    if (token.meta.pending) return sourceNode(source);
    const known = this.formulas.get(source);
    this.spend(20 + token.content.length);
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
  if (title || !open) node.title = title ?? address;
  return node;
}

// Images are not loaded: who serves them would learn of the reader.
function image(token) {
  const node = anchor(token.attrGet("src").replaceAll(MARK, ""), token.attrGet("title"), "image");
  node.append(words(token.children).replaceAll(MARK, "") || "image");
  return node;
}

const words = tokens => tokens.map(wordsOf).join("");
const wordsOf = ({ type, children, content }) => (type === "softbreak" ? "\n" : children ? words(children) : content);

function checkbox(checked) {
  const node = element("input");
  Object.assign(node, { type: "checkbox", defaultChecked: checked, disabled: true });
  node.setAttribute("aria-label", checked ? "done" : "to do");
  return node;
}

function citation(note) {
  const url = note.url || "", host = url.replace(/^https?:\/\/(www\.)?/i, "").split("/")[0];
  const node = anchor(url, [note.title, url].filter(Boolean).join("\n"), "cite");
  node.append(host || "source");
  return node;
}
