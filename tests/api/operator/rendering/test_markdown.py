"""Markdown, formulas and code as the chat page draws them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.api.operator.rendering.conftest import Browser
from tests.api.operator.rendering.spec import canonical, download, examples

# What an earlier renderer damaged, and what models write.
SAMPLES = {
    "2 * 3 * 4 = 24": "<p>2 * 3 * 4 = 24</p>",
    "1. a\n   ```sh\n   ls\n   ```\n2. b":
        '<ol><li>a<pre><code class="language-sh">ls\n</code></pre></li><li>b</li></ol>',
    "- a\n\n  b\n- c": "<ul><li><p>a</p><p>b</p></li><li><p>c</p></li></ul>",
    "__b__ _e_ ~~x~~ ***both***":
        "<p><strong>b</strong> <em>e</em> <del>x</del> <em><strong>both</strong></em></p>",
    "- [x] a\n- b": '<ul><li><input type="checkbox" checked disabled> a</li><li>b</li></ul>',
    "![a cat](https://a.b/c.png)": '<p><img src="https://a.b/c.png" alt="a cat"></p>',
    "| a |\n|---|\n| `x\\|y` |":
        "<table><thead><tr><th>a</th></tr></thead><tbody><tr><td><code>x|y</code></td></tr></tbody></table>",
    "[a](https://a.b/c_(d))": '<p><a href="https://a.b/c_(d)">a</a></p>',
    "main.py, //a.b, www.a.org": '<p>main.py, //a.b, <a href="http://www.a.org">www.a.org</a></p>',
    "<b>x</b> &amp; &lt;i&gt;": "<p>&lt;b&gt;x&lt;/b&gt; &amp; &lt;i&gt;</p>",
    "# a": "<h1>a</h1>",
    "x【0†L1-L2】 y": "<p>x y</p>",
    "It costs $5, then $6 or US$7; $HOME/$USER": "<p>It costs $5, then $6 or US$7; $HOME/$USER</p>",
}  # fmt: skip
FORMULAS = (
    r"\(x^2\)", r"\[\vec{x}\]", "\\[\na\n+ b\n\\]", "$$\nx\n= 1\n$$", r"$\alpha_1$",
    "- a\n\n  \\[ \\pmb{x} \\]",
)  # fmt: skip


def rendered(browser: Browser, text: str, options: str = "") -> str:
    """Returns the HTML of a text; ``options`` make a view draw it while it still arrives."""
    draw = f"new MarkdownView(box).update(text, {options})" if options else "box.append(renderMarkdown(text))"
    return browser.value(
        f"(text => {{ box.replaceChildren(); {draw}; return box.innerHTML }})({json.dumps(text)})"
    )


@pytest.mark.parametrize("text", SAMPLES)
def test_a_sample_means_what_it_says(browser: Browser, text: str) -> None:
    assert canonical(rendered(browser, text)) == canonical(SAMPLES[text])


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_is_drawn_and_can_be_read_aloud(browser: Browser, text: str) -> None:
    rendered(browser, text)
    assert browser.value("box.querySelectorAll('.formula math').length") == 1
    assert browser.value("box.querySelector('.katex-html').getBoundingClientRect().width") > 0


@pytest.mark.parametrize("text", [r"\(\frac{a\)", r"\(" + r"\sqrt" * 300 + r"x\)"])
def test_a_formula_that_cannot_be_drawn_shows_its_source(browser: Browser, text: str) -> None:
    rendered(browser, text)
    assert browser.text("#box .formula-source, #box p") == [text, text]


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a **b", "<p>a <strong>b</strong></p>"),
        ("a `b", "<p>a <code>b</code></p>"),
        ("```py\nx", '<pre><code class="language-py">x</code></pre>'),
        ("a\n-", "<p>a</p>"),
        ("see 【1†L", "<p>see</p>"),
        (r"a \(x^2", r'<p>a <code class="formula-source">\(x^2</code></p>'),
    ],
)
def test_text_that_still_arrives_shows_as_what_it_becomes(browser: Browser, text: str, html: str) -> None:
    assert canonical(rendered(browser, text, "{}")) == canonical(html)


@pytest.mark.parametrize("step", [1, 13])
def test_a_text_that_arrives_in_parts_ends_as_the_whole(browser: Browser, step: int) -> None:
    text = "\n\n".join(
        [*SAMPLES, *FORMULAS, "a\n---", "1. x\n\n2. y [z]", "```py\nx = 1\n```", "[z]: https://a.b"]
    )
    whole = rendered(browser, text)
    parts = browser.value(
        f"""((text, step) => {{
          const view = new MarkdownView(box);
          for (let end = 1; end < text.length; end += step, view.next = 0) view.update(text.slice(0, end));
          view.update(text, {{ done: true }});
          return box.innerHTML;
        }})({json.dumps(text)}, {step})"""
    )
    assert parts == whole


def test_finished_blocks_and_a_growing_block_of_code_stay_in_the_page(browser: Browser) -> None:
    kept = """(() => {
      const view = new MarkdownView(box), draw = text => { view.next = 0; view.update(text); };
      draw("a\\n\\n```py\\nx = 1\\n");
      const [first, button] = [box.firstChild, box.querySelector("button")];
      draw("a\\n\\n```py\\nx = 1\\ny = 2\\n");
      return first === box.firstChild && button === box.querySelector("button") && button.isConnected;
    })()"""
    assert browser.value(kept) is True
    assert browser.text("#box pre") == ["x = 1\ny = 2\n"]


def test_a_citation_takes_the_place_of_its_characters(browser: Browser) -> None:
    text = "😀 see ([a.b](https://a.b/c)), then `x`"
    note = {"start_index": 6, "end_index": 28, "url": "https://www.a.b/c", "title": "A"}
    browser.value(f"box.append(renderMarkdown({json.dumps(text)}, {{citations: [{json.dumps(note)}]}}))")
    assert browser.text("#box p") == ["😀 see a.b, then x"]
    assert browser.value("box.querySelector('a.cite').href") == note["url"]


def test_code_is_labelled_coloured_and_copied(browser: Browser) -> None:
    rendered(browser, "```python\ndef f(): pass\n```")
    assert browser.text(".code-language, #box .hljs-keyword") == ["Python", "def", "pass"]
    copied = "navigator.clipboard.writeText = async text => { window.copied = text; }"
    browser.value(f"(() => {{ {copied}; box.querySelector('button').click(); }})()")
    browser.until("box.querySelector('button').textContent === 'Copied'")
    assert browser.value("copied") == "def f(): pass\n"


@pytest.fixture(scope="session")
def specifications(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return download(tmp_path_factory.mktemp("specifications"))


# GFM 0.29 makes nested strong words one, against CommonMark 0.31, and both leave addresses alone in examples
# of something else.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "count", "share"), [("commonmark", 580, 0.99), ("gfm", 600, 0.97)])
def test_examples_of_the_specifications(
    browser: Browser, specifications: Path, name: str, count: int, share: float
) -> None:
    found = [each for each in examples(specifications / f"{name}.txt") if not each.has_raw_html]
    assert len(found) == count
    wrong = [each for each in found if canonical(rendered(browser, each.markdown)) != canonical(each.html)]
    assert 1 - len(wrong) / count >= share, wrong
