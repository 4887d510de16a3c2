// Files that are attached to the next message.

import { $, icon, iconButton, make, toast } from "./dom.js";

let attached = [], limit = Infinity;

export const setLimit = bytes => { limit = bytes; };

export function take() {
  const found = attached;
  put([]);
  return found;
}

export function put(files) {
  attached = files;
  $("files").replaceChildren(...files.map(file => make("li", {}, icon("file"), file.name,
    make("span", { class: "size" }, sizeOf(file.size)),
    iconButton("close", `Remove ${file.name}`, () => { put(attached.filter(each => each !== file)); $("attach").focus(); }))));
  $("files").hidden = !files.length;
}

export const hasAny = () => attached.length > 0;

export const sizeOf = bytes => bytes < 1000 ? bytes + " B" : bytes < 1e6 ? Math.round(bytes / 1000) + " kB" : (bytes / 1e6).toFixed(1) + " MB";

const isPdf = bytes => new TextDecoder("latin1").decode(bytes.subarray(0, 5)) === "%PDF-";

// Returns the problem with a file, or null. The server reads text and PDF; it says so for the content of a PDF.
function problem(file, bytes) {
  if (!file.size) return `${file.name} is empty.`;
  const encoded = Math.ceil(file.size / 3) * 4 + attached.reduce((sum, each) => sum + each.data.length, 0);
  if (encoded > limit * 0.95) return `${file.name} is too large: this server accepts ${sizeOf(Math.floor(limit * 0.95 / 4) * 3)} in all.`;
  if (isPdf(bytes)) return null;
  try {
    if (!new TextDecoder("utf-8", { fatal: true }).decode(bytes).includes("\0")) return null;
  } catch { /* not UTF-8 */ }
  return `${file.name} is neither text in UTF-8 nor a PDF file.`;
}

// Returns the content as the API takes it. The type is that of the content: browsers guess it from the name.
const encoded = bytes => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(new Blob([bytes], { type: isPdf(bytes) ? "application/pdf" : "text/plain" }));
});

export async function add(files) {
  for (const file of files) {
    try {
      const bytes = new Uint8Array(await file.arrayBuffer()), wrong = problem(file, bytes);
      if (wrong) { toast(wrong); continue; }
      put([...attached, { name: file.name, size: file.size, data: await encoded(bytes) }]);
    } catch { toast(`${file.name} cannot be read.`); }
  }
}

export function start() {
  $("attach").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", async event => {
    const files = [...event.target.files];
    event.target.value = "";
    await add(files);
    $("text").focus();
  });
  const carriesFiles = event => [...event.dataTransfer.types].includes("Files");
  $("chat").addEventListener("dragover", event => { if (carriesFiles(event)) { event.preventDefault(); $("form").classList.add("drop"); } });
  $("chat").addEventListener("dragleave", () => $("form").classList.remove("drop"));
  $("chat").addEventListener("drop", event => {
    $("form").classList.remove("drop");
    if (carriesFiles(event)) { event.preventDefault(); add(event.dataTransfer.files); }
  });
  $("text").addEventListener("paste", event => {
    if (event.clipboardData.files.length) { event.preventDefault(); add(event.clipboardData.files); }
  });
}
