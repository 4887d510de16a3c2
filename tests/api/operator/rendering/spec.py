"""The examples of the CommonMark and GFM specifications, and HTML in a form that can be compared."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

import lxml.html
import pytest

# Holds CommonMark 0.31.2 and GFM 0.29. Their licence (CC-BY-SA 4.0) keeps them out of this repository.
PACKAGE = "marko==2.2.4"
_EXAMPLE = re.compile(r"^`{32} example ?(\w*)\n(.*?)^\.\n(.*?)^`{32}$", re.MULTILINE | re.DOTALL)
_TAG = re.compile(r"<[/!?a-zA-Z][^>\n]*(?:>|$)", re.MULTILINE)
_AROUND_BLOCKS = re.compile(
    r"\s*(</?(?:p|h\d|ul|ol|li|blockquote|pre|table|thead|tbody|tr|th|td|hr|br)\b[^>]*>)\s*"
)


class Example(NamedTuple):
    extension: str
    markdown: str
    html: str

    @property
    def has_raw_html(self) -> bool:
        return any(tag in self.html for tag in _TAG.findall(self.markdown))


def download(folder: Path) -> Path:
    """Returns the folder of the specifications, or skips the test."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", PACKAGE]
    done = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"pip cannot download {PACKAGE}: {done.stderr.strip()[-300:]}")
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("*/tests/spec"))


def examples(path: Path) -> list[Example]:
    return [Example(*each) for each in _EXAMPLE.findall(path.read_text("utf-8").replace("→", "\t"))]


def canonical(html: str) -> str:
    """Returns what the HTML means. Ours has links for images, labels on code, and lower headings."""
    root = lxml.html.fragment_fromstring(html, create_parent="div")
    return _AROUND_BLOCKS.sub(r"\1", _inner(root, in_pre=False)).strip()


def _inner(node: lxml.html.HtmlElement, *, in_pre: bool) -> str:
    def words(text: str | None) -> str:
        return (text or "") if in_pre else re.sub(r"\s+", " ", text or "")

    return words(node.text) + "".join(_written(each, in_pre) + words(each.tail) for each in node)


def _written(node: lxml.html.HtmlElement, in_pre: bool) -> str:
    name = node.get("class", "")
    if name == "code-bar":
        return ""
    tag = re.sub(r"^level-(\d)$", r"h\1", name) if name.startswith("level-") else node.tag
    shown = {key: node.get(key) for key in ("start", "align", "type", "alt")}
    shown |= {key: None if node.get(key) is None else "" for key in ("checked", "disabled")}
    shown |= {"src": node.get("src"), "href": node.get("href", node.get("data-address"))}
    shown["title"] = node.get("title") if node.get("title") != shown["href"] else None
    if name.startswith("align-"):
        shown["align"] = name.removeprefix("align-")
    if tag == "code":
        shown["class"] = name or node.xpath("string(ancestor::figure/@data-language)")
        shown["class"] = shown["class"].removeprefix("language-")
    inner = node.text_content() if tag == "code" and in_pre else _inner(node, in_pre=in_pre or tag == "pre")
    if "image" in name.split():
        tag, shown["alt"], inner = "img", "" if inner == "image" else inner, ""
        shown["src"] = shown.pop("href")
    elif shown["href"] is not None:
        tag = "a"
    if tag in ("figure", "div"):
        return inner
    tag = "del" if tag == "s" else tag
    attributes = "".join(f' {key}="{shown[key]}"' for key in sorted(shown) if shown[key] is not None)
    return f"<{tag}{attributes}>{inner}</{tag}>"
