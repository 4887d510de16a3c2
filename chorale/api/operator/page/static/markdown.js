// Markdown to tokens: markdown-it with GFM, formulas, and limits that keep hostile text from freezing the page.

import MarkdownIt from "./vendor/markdown-it.js";

const DEEPEST = 40;  // levels of lists and quotes; the text below them is shown as it is
const LONGEST_PARAGRAPH = 20_000;  // characters; a longer one is shown as plain text
const LONGEST_FORMULA = 4_000;
const FORMULA_LINES = 200;
const CLOSERS = { "\\(": "\\)", "\\[": "\\]", "$$": "$$" };

const parser = new MarkdownIt({ html: false, linkify: true });

// GFM links "www.", addresses with a scheme, and mail addresses, but neither "main.py" nor "//host".
parser.linkify.add("//", null);
parser.linkify.add("www.", {
  validate(text, position, linkify) {
    const host = linkify.re.get_relative_proto_validator();
    host.lastIndex = position;
    const found = host.exec(text);
    return found ? found[0].length : 0;
  },
  normalize(match) { match.url = "http://" + match.url; },
});

// Returns markdown-it's tokens. `partial` text goes on: what it leaves open is shown as far as it has come.
// `references` collects the link definitions of the parts of one text.
export function parse(text, { partial = false, references = {} } = {}) {
  const env = { references, partial };
  return parser.parse(text, env);
}

// The language of a block of code, as its fence names it.
export const languageOf = token => parser.utils.unescapeAll(token.info).trim().split(/\s/)[0];

const blank = text => !/\S/.test(text);
const wordCharacter = character => character !== undefined && /[\p{L}\p{N}]/u.test(character);

// ------------------------------------------------------------------ formulas

// The end of a formula that opens with one of CLOSERS, or -1. A formula holds no other opener. Each closer is searched
// for once: a text of openers alone would otherwise be read to its end for each of them.
function closerOf(opener, { src, env }, from) {
  if (env.closers?.src !== src) env.closers = { src };
  const known = env.closers;
  if (!(known[opener] >= from)) {
    const found = src.indexOf(CLOSERS[opener], from);
    known[opener] = found < 0 ? Infinity : found;
  }
  const end = known[opener];
  if (end - from > LONGEST_FORMULA || blank(src.slice(from, end))) return -1;
  return opener !== "$$" && src.slice(from, end).includes(opener) ? -1 : end;
}

// Pandoc's rules, stricter by what keeps prices and shell variables as they are: the next $ is the end or there is
// none; no space within it at either side; no letter, digit or $ outside.
function dollarEnd(text, from) {
  const before = text[from - 2];
  if (before === "$" || wordCharacter(before) || /[\s$]/.test(text[from] ?? " ")) return -1;
  const found = /(?:[^$\\`]|\\.){1,1000}/suy;
  found.lastIndex = from;
  const inner = found.exec(text)?.[0];
  const end = from + (inner?.length ?? 0);
  if (!inner || text[end] !== "$" || /\s$/.test(inner)) return -1;
  if (text[end + 1] === "$" || wordCharacter(text[end + 1])) return -1;
  return /^\d[\d.,]*\s+\p{L}{2}/u.test(inner) ? -1 : end;  // "$20 million or 30$"
}

function inlineFormula(state, silent) {
  const { src, pos, posMax, env } = state;
  if (src[pos] !== "\\" && src[pos] !== "$") return false;
  const opener = CLOSERS[src.slice(pos, pos + 2)] ? src.slice(pos, pos + 2) : src[pos];
  if (opener === "\\") return false;
  const from = pos + opener.length;
  let end = opener === "$" ? dollarEnd(src, from) : closerOf(opener, state, from);
  const pending = end < 0 && !silent && opener !== "$" && env.partial && src === env.last && opensHere(state, opener);
  if (pending) end = posMax;
  if (end < 0 || end > posMax) return false;
  state.pos = pending ? posMax : end + (CLOSERS[opener] ?? "$").length;
  if (silent) return true;
  const token = state.push("formula", "", 0);
  token.content = src.slice(from, end);
  token.markup = opener;
  token.meta = { display: opener !== "$" && opener !== "\\(", pending, source: src.slice(pos, state.pos) };
  return true;
}

// Whether the rest of partial text may be a formula that has not ended.
function opensHere({ src, pos }, opener) {
  const rest = src.slice(pos + opener.length);
  return rest.length <= LONGEST_FORMULA && !rest.includes(opener) && !rest.includes(CLOSERS[opener]);
}

function blockFormula(state, startLine, endLine, silent) {
  const line = at => state.src.slice(state.bMarks[at] + state.tShift[at], state.eMarks[at]);
  if (state.sCount[startLine] - state.blkIndent >= 4) return false;
  const first = line(startLine), opener = first.slice(0, 2), closer = CLOSERS[opener];
  if (opener === "\\(" || !closer || first[2] === "$") return false;
  let last = startLine, rest = first.slice(2);
  while (!rest.includes(closer)) {
    last++;
    if (last >= endLine) {
      if (!state.env.partial) return false;
      break;
    }
    rest = line(last);
    if (last - startLine > FORMULA_LINES || blank(rest) || state.sCount[last] < state.blkIndent) return false;
    if (opener !== "$$" && rest.includes(opener)) return false;
  }
  const pending = last >= endLine;
  if (!pending && !blank(rest.slice(rest.indexOf(closer) + 2))) return false;
  const source = state.getLines(startLine, Math.min(last + 1, endLine), state.sCount[startLine], false).trim();
  const content = pending ? source.slice(2) : source.slice(2, -2);
  if (source.length > LONGEST_FORMULA || (blank(content) && !pending)) return false;
  if (silent) return true;
  state.line = Math.min(last + 1, endLine);
  const token = state.push("formula_block", "", 0);
  Object.assign(token, { content, block: true, map: [startLine, state.line], markup: opener });
  token.meta = { display: true, pending, source };
  return true;
}

// ------------------------------------------------------------------ limits and task lists

// Shows what lies too deep as text: markdown-it would leave it out.
function deepText(state, startLine, endLine, silent) {
  if (state.level < DEEPEST || silent) return false;
  let line = startLine + 1;
  while (line < endLine && (state.isEmpty(line) || state.sCount[line] >= state.blkIndent)) line++;
  state.line = line;
  const token = state.push("plain", "", 0);
  token.content = state.getLines(startLine, line, state.blkIndent, false).trimEnd();
  token.map = [startLine, line];
  return true;
}

function beforeInline(state) {
  for (const token of state.tokens)
    if (token.type === "inline" && token.content.length > LONGEST_PARAGRAPH) token.type = "plain";
  const last = state.tokens.findLast(token => token.type === "inline" || token.type === "fence");
  if (state.env.partial && last?.type === "inline") last.content = closed(last.content);
  state.env.last = last?.type === "inline" ? last.content : null;
}

// Partial text with an end for the bold words or the code that it has begun: their marks would show until then.
function closed(content) {
  const text = content.replace(/\*+$/, ""), words = text.replace(/(?<!`)(`+)(?!`)[^]*?(?<!`)\1(?!`)/g, "");
  const code = /(?<!`)`{1,2}(?!`)(?=[^`]*$)/.exec(words)?.[0];
  if (code) return words.endsWith(code) ? text.slice(0, -code.length) : text.trimEnd() + code;
  return words.split("**").length % 2 ? text : text.trimEnd() + "**";
}

function taskLists(state) {
  state.tokens.forEach((token, place) => {
    if (token.type !== "inline" || state.tokens[place - 2]?.type !== "list_item_open") return;
    const first = token.children[0], box = /^\[([ xX])\](?=\s)/.exec(first?.type === "text" ? first.content : "");
    if (!box) return;
    const checkbox = new state.Token("checkbox", "input", 0);
    checkbox.meta = { checked: box[1] !== " " };
    first.content = first.content.slice(3);
    token.children.unshift(checkbox);
    state.tokens[place - 2].meta = { task: true };
  });
}

parser.inline.ruler.before("escape", "formula", inlineFormula);
parser.block.ruler.before("table", "deep", deepText);
parser.block.ruler.before("fence", "formula", blockFormula, { alt: ["paragraph", "reference", "blockquote", "list"] });
parser.core.ruler.before("inline", "limits", beforeInline);
parser.core.ruler.after("inline", "tasks", taskLists);
