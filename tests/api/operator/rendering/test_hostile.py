"""Markdown that attacks the page: no script runs, nothing is requested, and the page answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.operator.rendering.conftest import Browser

_TAGS = (
    "<script>ran()</script>", "<img src=x onerror=ran()>", "<svg onload=ran()>", "<body onload=ran()>",
    "<iframe srcdoc='<script>parent.ran()</script>'></iframe>", "<details open ontoggle=ran()>",
    "<input autofocus onfocus=ran()>", "<a href='javascript:ran()'>x</a>", "<math><mtext><script>ran()",
    "<link rel=stylesheet href=/evil.css>", "<style>@import '/evil.css'</style>",
    "<base href=//evil.invalid>", "<meta http-equiv=refresh content='0;url=/evil'>",
    "</p></main><script>ran()</script>",
    "<form action=/evil><button>x", "<template><script>ran()</script></template>",
    "<!--><img src=x onerror=ran()>",
)  # fmt: skip
_LINKS = tuple(
    f"[x]({scheme}ran())" for scheme in (
        "javascript:", "JaVaScRiPt:", "javascript&colon;", "java\tscript:", "&#106;avascript:", "vbscript:",
        "data:text/html,<script>", "\x01javascript:", "blob:", "//evil.invalid/", "javascript://%0a",
    )
)  # fmt: skip
_OTHER = (
    "![x](javascript:ran())", "![x](/evil.png)", "![x](data:image/svg+xml;base64,PHN2Zy8+)",
    "<javascript:ran()>", "[x]: javascript:ran()\n\n[x]", '[x](https://a.b "onmouseover=ran()")',
    '[x](https://a.b"onclick="ran())',
    '```"><img/src=x/onerror=ran()>\nx\n```', "```html\n<script>ran()</script>\n```",
    "`<script>ran()</script>`", "| <script>ran()</script> |\n|---|\n| <img src=x onerror=ran()> |",
    "```__proto__\nx\n```",
    "```constructor\nx\n```", r"\(\href{javascript:ran()}{x}\)", r"\(\htmlData{x=ran()}{x}\)",
    r"\(\includegraphics{/evil.png}\)", r"\(\text{<img src=x onerror=ran()>}\)",
    r"\(\htmlStyle{background:url(/evil.png)}{x}\)", r"\(\color{url(/evil.png)}x\)",
    r"\(\unicode{<script>ran()</script>}\)", r"\(\def\a{\a\a}\a\)", "[^x]: y\n\n# constructor {#__proto__}",
)  # fmt: skip
HOSTILE = (*_TAGS, *_LINKS, *_OTHER)

LARGE = {
    **{
        text: text * (200_000 // len(text))
        for text in ("[", "*", ">", "$", "`", "- ", "\\(", "a\n", "http://a.b ", "【1†")
    },
    "paragraphs": ("![a](b) **c** _d_ \\(x^2\\) $y$ " * 600 + "\n\n") * 10,
    "brackets": ("![" * 9_900 + "\n\n") * 5,
    "addresses": ("http://" * 2_800 + "\n\n") * 5,
    "blocks": "# a\n\n- b\n\n```py\nx = 1\n```\n\n" * 7_000,
    "nested": "\n".join("  " * depth + "- a" for depth in range(440)),
    "emphasis": "*a " * 3_000 + "a* " * 3_000,
    "macros": ("\\(\\def\\a{" + "x" * 1_900 + "}" + "\\a" * 900 + "\\)\n\n") * 50,
    "colours": ("```csharp\n" + ("function " * 8 + "\n") * 200 + "```\n\n") * 13,
    "long lines": "```csharp\n" + "a" * 15_000 + "\n```",
    "code": "```python\n" + "def f(x): return '\\'' # \"\n" * 7_700 + "```",
}


def test_no_hostile_text_runs_or_requests(browser: Browser) -> None:
    assert len(HOSTILE) == 50
    found: dict[str, Any] = browser.value(
        """(async texts => {
          window.count = 0; window.violations = 0;
          window.ran = window.alert = () => { count++; };
          document.addEventListener("securitypolicyviolation", () => { violations++; });
          for (const text of texts) {
            box.append(renderMarkdown(text));
            const view = new MarkdownView(box.appendChild(document.createElement("section")));
            for (let end = 1; end < text.length; end++) { view.next = 0; view.update(text.slice(0, end)); }
          }
          for (const node of box.querySelectorAll("*"))
            for (const name of ["mouseover", "focus", "toggle"]) node.dispatchEvent(new Event(name));
          await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
          const all = [...box.querySelectorAll("*")];
          return {
            count, violations, tags: [...new Set(all.map(node => node.localName))],
            names: all.flatMap(node => node.getAttributeNames()).filter(name => /^(on|src|id$)/.test(name)),
            schemes: [...new Set([...box.querySelectorAll("a")].map(node => new URL(node.href).protocol))],
          };
        })(""" + json.dumps(HOSTILE) + ")"
    )  # fmt: skip
    assert (found["count"], found["violations"], found["names"]) == (0, 0, [])
    assert set(found["schemes"]) == {"https:"}
    assert not {"script", "img", "iframe", "style", "link", "base", "meta", "form", "object"} & set(
        found["tags"]
    )
    assert [path for path in browser.requests if not path.startswith("/vendor/fonts/")] == []


def busy_seconds(browser: Browser) -> float:
    """Returns the processor time of the page's thread."""
    metrics = {each["name"]: each["value"] for each in browser.call("Performance.getMetrics")["metrics"]}
    return float(metrics["TaskDuration"])


@pytest.mark.parametrize("name", LARGE)
def test_long_text_is_drawn_in_bounded_time_and_depth(browser: Browser, name: str) -> None:
    """A search that is quadratic in such text takes minutes."""
    browser.call("Performance.enable", timeDomain="threadTicks")
    before = busy_seconds(browser)
    elements, depth = browser.value(
        """(text => {
          const root = document.createElement("div");
          root.append(renderMarkdown(text));
          let depth = 0;
          for (const node of root.querySelectorAll(":not(.formula *)")) {
            let level = 0;
            for (let up = node; up !== root; up = up.parentNode) level++;
            depth = Math.max(depth, level);
          }
          return [root.querySelectorAll("*").length, depth];
        })(""" + json.dumps(LARGE[name]) + ")"
    )  # fmt: skip
    assert busy_seconds(browser) - before < 3
    assert elements < 90_000
    assert depth <= 70
