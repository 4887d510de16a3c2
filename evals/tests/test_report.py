"""The report page: nothing that a model writes becomes markup, and every answer can be found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from chorale_evals.journal import Journal
from chorale_evals.manifest import Manifest, TaskInfo
from chorale_evals.record import Record
from chorale_evals.report.page import write_report

from chorale.cli.main import main
from chorale.requests.usage import TokenUsage
from tests.support.browsers.chromium import PATH, Page

HOSTILE = (
    "</script><script>window.taken=1</script><img src=x onerror='window.taken=2'><!-- {data} {script} "
    "{style} \u2028\u2029\x00\ud800 ]]> </textarea><a href='javascript:window.taken=3'>"
)


def fill(folder: Path, count: int) -> Path:
    """Writes a run in which every string is hostile."""
    with Journal(folder) as journal:
        for number in range(count):
            reply = {"text": f"answer-{number} {HOSTILE}", "reasoning": HOSTILE * 20}
            exchange = {"kept": 0, "messages": [{"role": "user", "content": HOSTILE}], "reply": reply}
            journal.append(
                Record(
                    f"task{HOSTILE}", "low", f"s{number:04d}{HOSTILE}", 0, "answered", number % 2, HOSTILE,
                    {"reason": HOSTILE}, finish="length" if number == 5 else "stop",
                    usage=TokenUsage(1, 0, 2),
                    group=f"g{number % 3}", question={"q": HOSTILE}, target=HOSTILE, exchanges=[exchange],
                )
            )  # fmt: skip
    task = TaskInfo("1", notes=HOSTILE)
    Manifest({"model": HOSTILE}, {"id": "x"}, {f"task{HOSTILE}": task}, ("low",)).write(folder)
    row = {
        "task": HOSTILE,
        "effort": "low",
        "score": 0.5,
        "low": 0.4,
        "high": 0.6,
        "breakdowns": [[HOSTILE, 1, 2]],
    }
    (folder / "summary.json").write_text(json.dumps({"results": [row]}))
    return write_report(folder)


def test_data_are_never_markup(tmp_path: Path) -> None:
    text = fill(tmp_path, 7).read_text("utf-8")
    assert "taken" not in text
    assert len(re.findall(r"<script", text)) == 4  # a chunk, head, index, and the page's own
    assert re.search(
        r"default-src &#x27;none&#x27;; style-src &#x27;sha256-[^ ]+; script-src &#x27;sha256-", text
    )
    assert not re.search(
        r"https?://|//[a-z]+\.", re.sub(r'placeholder="[^"]*"|//.*', "", text.split("<style>")[0])
    )


@pytest.mark.skipif(PATH is None, reason="Chromium is not installed")
def test_every_answer_can_be_found(tmp_path: Path) -> None:
    path = fill(tmp_path / "run", 250)
    page = Page(tmp_path / "profile")
    try:
        page.open(path.as_uri())
        page.until("document.body && document.body.dataset.ready")
        assert page.text("#count") == ["250 of 250 answers"]
        assert len(page.text("#list li")) == 100
        page.click("#list li:nth-child(3)")
        page.until("document.querySelector('#sample dl')")
        assert "answer-2 </script><script>" in page.text("#sample pre.answer")[0]
        choose(page, "by-state", "right")
        page.until("document.getElementById('count').textContent === '125 of 250 answers'")
        choose(page, "by-state", "cut")
        page.until("document.getElementById('count').textContent === '1 of 250 answers'")
        choose(page, "by-state", "")
        page.value("document.getElementById('search').value = 'ANSWER-117 '")
        page.value("document.getElementById('search').dispatchEvent(new Event('input'))")
        page.until("document.getElementById('count').textContent === '1 of 250 answers'")
        assert page.value("window.taken") is None
        assert page.value("document.querySelectorAll('img, a').length") == 0
        assert page.console == []
    finally:
        page.close()


def choose(page: Page, name: str, value: str) -> None:
    page.value(f"document.getElementById({name!r}).value = {value!r}")
    page.value(f"document.getElementById({name!r}).dispatchEvent(new Event('change'))")


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "report", str(tmp_path)]) == 2
    assert "there is no run here" in capsys.readouterr().err
    fill(tmp_path, 2)
    with (tmp_path / "journal.jsonl").open("ab") as journal:
        journal.write(b"{}\n")
    assert main(["eval", "report", str(tmp_path)]) == 2
    assert "line 3: not a record" in capsys.readouterr().err
