// Building blocks of the page: elements, icons, dialogs, short notices, and text for screen readers.

export const $ = id => document.getElementById(id);

// Returns an element. Keys of `attributes` that begin with "on" are listeners; null and false are left out.
export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter(child => child !== null && child !== undefined && child !== ""));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";
const PATHS = {  // on a grid of 24, drawn with round strokes
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  sidebar: "M4 5h16v14H4zM9.5 5v14",
  sliders: "M4 8h9M17 8h3M15 6a2 2 0 1 0 0 4a2 2 0 1 0 0-4M4 16h3M11 16h9M9 14a2 2 0 1 0 0 4a2 2 0 1 0 0-4",
  down: "M12 5v14M6 13l6 6 6-6",
  up: "M12 19V5M6 11l6-6 6 6",
  clip: "M20 11.5l-8.2 8.2a5 5 0 0 1-7.1-7.1l8.5-8.5a3.4 3.4 0 0 1 4.8 4.8l-8.5 8.5a1.7 1.7 0 0 1-2.4-2.4l7.8-7.8",
  stop: "M7 7h10v10H7z",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  upload: "M12 16V5M7 9l5-5 5 5M5 20h14",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10.5 11v5M13.5 11v5",
  pencil: "M5 19l1-4L16 5l3 3L9 18zM14 7l3 3",
  copy: "M9 9h10v11H9zM15 9V4H5v11h4",
  check: "M5 13l4.5 4.5L19 7",
  redo: "M19 5v5h-5M19 10a7.5 7.5 0 1 0 .6 4.5",
  play: "M8 5l11 7-11 7z",
  left: "M14.5 6l-6 6 6 6",
  right: "M9.5 6l6 6-6 6",
  globe: "M12 3.5a8.5 8.5 0 1 0 0 17a8.5 8.5 0 1 0 0-17M3.5 12h17M12 3.5c-5 5-5 12 0 17M12 3.5c5 5 5 12 0 17",
  code: "M8.5 7L3.5 12l5 5M15.5 7l5 5-5 5",
  plug: "M9 3v5M15 3v5M6 8h12v3a6 6 0 0 1-12 0zM12 17v4",
  file: "M7 3h7l4 4v14H7zM14 3v4h4",
  bulb: "M9.5 18h5M10.5 21h3M12 3a6 6 0 0 0-3.5 10.9V15h7v-1.1A6 6 0 0 0 12 3z",
};

export function icon(name) {
  const picture = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  for (const [key, value] of [["viewBox", "0 0 24 24"], ["aria-hidden", "true"], ["class", "svg icon-" + name]])
    picture.setAttribute(key, value);
  path.setAttribute("d", PATHS[name]);
  picture.append(path);
  return picture;
}

export function iconButton(name, label, onclick, extra = {}) {
  return make("button", { type: "button", class: "icon", "aria-label": label, title: label, onclick, ...extra }, icon(name));
}

// Adds the icons that index.html names.
export function drawIcons() {
  for (const node of document.querySelectorAll("[data-icon]")) node.prepend(icon(node.dataset.icon));
}

// Speaks to screen readers. Each text replaces the one before.
export function announce(text) {
  $("live").textContent = text;
}

let hiding;
export function toast(text) {
  clearTimeout(hiding);
  $("toast").textContent = text;
  $("toast").classList.add("shown");
  hiding = setTimeout(() => { $("toast").classList.remove("shown"); $("toast").textContent = ""; }, 6000);
}

// Asks a question in a dialog. Resolves to true if the user agrees.
export function confirmed(title, text, yes) {
  const box = $("ask");
  $("ask-title").textContent = title;
  $("ask-text").textContent = text;
  $("ask-yes").textContent = yes;
  box.returnValue = "no";
  box.showModal();
  return new Promise(resolve => box.addEventListener("close", () => resolve(box.returnValue === "yes"), { once: true }));
}

export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = document.body.appendChild(make("textarea"));  // pages over plain HTTP have no clipboard
  box.value = text;
  box.select();
  document.execCommand("copy");
  box.remove();
}

export function saveFile(name, text) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

// Returns a link that opens in a new tab; plain text if a browser should not open the address.
export function outside(text, url, className) {
  if (!/^https?:\/\//i.test(url || "")) return make("span", { class: className }, text);
  return make("a", { class: className, href: url, target: "_blank", rel: "noreferrer noopener" }, text);
}
