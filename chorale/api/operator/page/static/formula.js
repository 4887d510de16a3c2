// LaTeX to nodes, with KaTeX. The page's content policy allows no style attributes: KaTeX's are set as properties.

import "./vendor/katex.js";

const katex = globalThis.katex;
const OPTIONS = { throwOnError: true, strict: "ignore", trust: false, maxSize: 20, maxExpand: 100 };
const MOST_NODES = 20_000, DEEPEST = 150;  // of one formula; layout is recursive, and slow in deep trees

// Returns a node with the formula, or with its source where KaTeX cannot draw it.
export function formulaNode(tex, { display, source }) {
  try {
    const tree = katex.__renderToDomTree(tex, { ...OPTIONS, displayMode: display });
    moveStyles(tree);
    const node = document.createElement("span");
    node.className = display ? "formula display" : "formula";
    if (display) node.tabIndex = 0;  // it may be wider than the page, and scrolls
    node.append(tree.toNode());
    return node;
  } catch (error) {
    return sourceNode(source, error.message);
  }
}

// The source of a formula that has an error, or that has not ended yet.
export function sourceNode(source, title = "") {
  const node = document.createElement("code");
  node.className = "formula-source";
  node.textContent = source;
  if (title) node.title = title;
  return node;
}

// KaTeX writes "style" attributes on a few nodes of SVG and MathML, which the content policy refuses.
function moveStyles(tree) {
  let count = 0;
  const waiting = [[tree, 0]];
  while (waiting.length) {
    const [node, depth] = waiting.pop();
    if (++count > MOST_NODES || depth > DEEPEST) throw new RangeError("The formula is too large.");
    const style = node.attributes?.style;
    if (style) {
      delete node.attributes.style;
      const toNode = node.toNode;
      node.toNode = function () {
        const made = toNode.call(this);
        made.style.cssText = style;
        return made;
      };
    }
    for (const child of node.children ?? []) waiting.push([child, depth + 1]);
  }
}
