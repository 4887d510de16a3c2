// Blocks of code: a label, a button that copies, and colours by highlight.js.

import hljs from "./vendor/highlight.js";

// highlight.js is quadratic in some texts, so a block has limits: half a second for the worst known one.
const LONGEST = 16_000, LONG_LINE = /[^\n]{501}/;  // characters
const texts = new WeakMap();  // from the figure to its code, as the button copies it

// Collects highlight.js's output as nodes: its HTML is never parsed.
class NodeEmitter {
  constructor(options) {
    this.options = options;
    this.root = document.createDocumentFragment();
    this.stack = [this.root];
  }
  addText(text) { if (text) this.stack.at(-1).append(text); }
  openNode(scope) {
    const [name, ...more] = scope.split(".");
    const prefix = this.options.classPrefix;
    const classes = [prefix + name, ...more.map((each, place) => each + "_".repeat(place + 1))];
    this.stack.push(this.stack.at(-1).appendChild(element("span", classes.join(" "))));
  }
  closeNode() { if (this.stack.length > 1) this.stack.pop(); }
  startScope(scope) { this.openNode(scope); }
  endScope() { this.closeNode(); }
  __addSublanguage(emitter) { this.stack.at(-1).append(emitter.root); }
  finalize() { this.stack.length = 1; }
  toHTML() { return ""; }
}
hljs.configure({ __emitter: NodeEmitter });

export function element(tag, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text) node.textContent = text;
  return node;
}

// Returns a figure with the code. `old` is one that showed an earlier state of the same block: it is kept, so its
// button can be pressed while the text grows. `clock` has the milliseconds that are left for colours.
export function codeBlock(text, language, old, clock) {
  const name = language.slice(0, 30);
  const kept = old && texts.has(old) && old.dataset.language === name && text.startsWith(texts.get(old));
  const figure = kept ? old : frame(name);
  if (kept && texts.get(old) === text) return figure;
  texts.set(figure, text);
  figure.querySelector("code").replaceChildren(coloured(text, name, clock));
  return figure;
}

function frame(name) {
  const known = hljs.getLanguage(name);
  const label = known?.name ?? name;
  const figure = element("figure", "code");
  figure.dataset.language = name;
  figure.setAttribute("aria-label", label ? `Code: ${label}` : "Code");
  const bar = figure.appendChild(element("div", "code-bar"));
  bar.append(element("span", "code-language", label), copyButton(figure));
  const box = figure.appendChild(element("pre"));
  box.tabIndex = 0;  // a keyboard can scroll it
  box.append(element("code"));
  return figure;
}

function coloured(text, name, clock) {
  if (!hljs.getLanguage(name) || text.length > LONGEST || LONG_LINE.test(text) || clock.left <= 0)
    return document.createTextNode(text);
  const begun = performance.now();
  const { root } = hljs.highlight(text, { language: name, ignoreIllegals: true })._emitter;
  clock.left -= performance.now() - begun;
  return root.textContent === text ? root : document.createTextNode(text);  // it gives up within some texts
}

function copyButton(figure) {
  const button = element("button", "code-copy", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", "Copy code");
  button.addEventListener("click", async () => {
    const done = await copyText(texts.get(figure)).then(() => true, () => false);
    button.textContent = done ? "Copied" : "Not copied";
    button.setAttribute("aria-label", button.textContent);
    setTimeout(() => {
      button.textContent = "Copy";
      button.setAttribute("aria-label", "Copy code");
    }, 2000);
  });
  return button;
}

export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = document.body.appendChild(element("textarea"));  // pages over plain HTTP have no clipboard
  box.value = text;
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  if (!done) throw new Error("the browser did not copy");
}
