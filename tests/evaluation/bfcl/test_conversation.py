"""The multi-turn loop: what the model is sent, when a turn ends, and what happens if the APIs fail."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from chorale.errors import ConfigError
from chorale.evaluation.task import Outcome
from chorale.evaluation.tasks.bfcl import Bfcl, api_process, bfcl, conversation, multi_turn
from tests.evaluation.bfcl.scripted import Calls, ScriptedSession

ADD = ("add_item", '{"name": "beans", "quantity": 3}')
OPEN, TAKE, CLOSE = ("open_door", "{}"), ("take_item", '{"name": "salt"}'), ("close_door", "{}")
COUNT, NOTE = ("count_item", '{"name": "rice"}'), ("note", '{"text": "rice"}')
RIGHT = [[OPEN], [ADD], [], [COUNT, NOTE], [], [TAKE, CLOSE], []]


def play(task: Bfcl, name: str, script: Sequence[Calls]) -> tuple[Outcome, ScriptedSession]:
    session = ScriptedSession(script)
    sample = next(sample for sample in task.samples() if sample.id == name)
    return asyncio.run(task.run(sample, 0, session)), session


def test_a_turn_goes_on_until_the_model_calls_nothing() -> None:
    outcome, session = play(bfcl(data=Path("sample")), "multi_turn_base_0", RIGHT)
    assert (outcome.score, outcome.detail["reason"]) == (1.0, "right")
    assert outcome.answer == (
        "open_door(); add_item(name='beans',quantity=3)\ncount_item(name='rice'); note(text='rice')\n"
        "take_item(name='salt'); close_door()"
    )
    messages, tools = session.sent[-1]
    assert [message["role"] for message in messages] == [
        *("user", "assistant", "tool", "assistant", "tool", "assistant"),
        *("user", "assistant", "tool", "tool", "assistant", "user", "assistant", "tool", "tool"),
    ]
    assert messages[8]["content"] == '{"name": "rice", "quantity": 2}'
    assert messages[9]["content"] == "noted: rice"
    assert messages[9]["tool_call_id"] == messages[7]["tool_calls"][1]["id"]
    assert [tool["function"]["name"] for tool in tools][:2] == ["open_door", "close_door"]
    assert "response" not in tools[0]["function"]
    assert outcome.detail["turns"][1][0]["calls"] == ["count_item(name='rice')", "note(text='rice')"]


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ([[OPEN], [ADD], [], [NOTE], [], [TAKE, CLOSE], []], "multi_turn:execution_response_mismatch"),
        ([[OPEN], [ADD], [], [COUNT, NOTE], [], [TAKE], []], "multi_turn:instance_state_mismatch"),
        ([[OPEN], [ADD], [], [], [COUNT, NOTE, TAKE], []], "multi_turn:empty_turn_model_response"),
        ([[COUNT]] * 100, "multi_turn:force_terminated"),
        ([[("open_door", "[")], [], []], "multi_turn:empty_turn_model_response"),
    ],
)
def test_wrong_conversations(script: Sequence[Calls], kind: str) -> None:
    outcome, _ = play(bfcl(data=Path("sample")), "multi_turn_base_0", script)
    assert (outcome.score, outcome.detail["kind"]) == (0.0, kind)


def test_more_than_twenty_steps_end_the_conversation() -> None:
    _, session = play(bfcl(data=Path("sample")), "multi_turn_base_0", [[COUNT]] * 100)
    assert len(session.sent) == 21


def test_calls_that_are_no_json_end_the_turn_and_are_answered() -> None:
    broken = [OPEN, ("add_item", '{"name"')]
    _, session = play(bfcl(data=Path("sample")), "multi_turn_base_0", [broken, [], []])
    messages = session.sent[1][0]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "user"]
    assert messages[2]["content"] == "Error: the arguments are not a JSON object."


def test_a_withheld_function_comes_with_its_turn() -> None:
    script = [[OPEN, ADD], [], [COUNT], [], [NOTE], [], [TAKE, CLOSE], []]
    outcome, session = play(bfcl(data=Path("sample")), "multi_turn_miss_func_0", script)
    assert outcome.score == 1.0  # also with a call a turn too early: results so far count
    names = [[tool["function"]["name"] for tool in tools] for _, tools in session.sent]
    assert ["note" in tools for tools in names] == [False] * 4 + [True] * 4
    more = session.sent[4][0][-1]
    assert more["content"] == "I have updated some more functions you can choose from. What about now?"


def test_text_that_looks_like_a_call_is_not_evaluated() -> None:
    evil = "list_items.__globals__['_START'].clear"
    private = "model_multi_turn_base_0_PantryAPI_instance._load_scenario"
    names = (evil, "_load_scenario", private, "open", "multi_turn_base_0", "exit", "")
    script = [[(name, '{"scenario": {}}') for name in names], [], []]
    outcome, _ = play(bfcl(data=Path("sample")), "multi_turn_base_0", script)
    results = outcome.detail["turns"][0][0]["results"]
    assert all(result.startswith("Error during execution: ") for result in results)
    assert results[1:4] == [
        f"Error during execution: name {name!r} is not defined"
        for name in ("_load_scenario", private, "open")
    ]
    assert results[5] == "Error during execution: Function call exit is not allowed."


def test_equal_results_are_expected_as_often_as_they_occur() -> None:
    assert conversation._missing(["a", "b", "a"], ["b", "a", "c", "a"]) == []
    assert conversation._missing(["a", "b", "a"], ["b", "a", "c"]) == ["a"]


# ---------------------------------------------------------------------- API classes that fail

FAULTY = """
import os, sys, time
print("imported")
class FaultyAPI:
    def __init__(self):
        self.count = 0
    def _load_scenario(self, scenario, long_context=False):
        print("loaded", flush=True)
        os.write(1, b"not an answer\\n")
        assert not scenario.get("broken"), "no such scenario"
    def work(self, n=1):
        self.count += n
        return self.count
    def sleep(self):
        time.sleep(1000)
    def leave(self):
        os._exit(3)
    def eat(self):
        return len(bytearray(2**34))
    def write(self):
        with open(os.path.join(os.path.dirname(__file__), "written"), "w") as file:
            file.write("x")
    def fork(self):
        return os.fork() or time.sleep(1000)
"""


def faulty(folder: Path, source: str = FAULTY, **initial: Any) -> Path:
    """Makes a folder of one test case with the class of ``source``."""
    for name in ("possible_answer", "multi_turn_func_doc", "func_source_code"):
        (folder / name).mkdir()
    parameters = {"type": "dict", "properties": {}, "required": []}
    turns = [[{"role": "user", "content": "Work."}]]
    row = {"id": "multi_turn_base_0", "question": turns, "involved_classes": ["FaultyAPI"]}
    row["initial_config"] = {"FaultyAPI": initial}
    function = {"name": "work", "description": "Works.", "parameters": parameters}
    answer = {"id": "multi_turn_base_0", "ground_truth": [["work()"]]}
    (folder / "BFCL_v4_multi_turn_base.json").write_text(json.dumps(row))
    (folder / "possible_answer" / "BFCL_v4_multi_turn_base.json").write_text(json.dumps(answer))
    (folder / "multi_turn_func_doc" / "faulty.json").write_text(json.dumps(function))
    (folder / "func_source_code" / "faulty.py").write_text(source)
    return folder


@pytest.mark.parametrize(
    ("calls", "score", "says"),
    [
        ([("work", "{}")], 1.0, "right"),
        ([("work", "{}"), ("eat", "{}"), ("write", "{}")], 1.0, "right"),  # errors that the model reads
        ([("leave", "{}")], 0.0, "the process of the API classes has ended"),
        ([("sleep", "{}")], 0.0, "no answer within 0.3 s"),
        ([("work", "{}"), ("fork", "{}")], 1.0, "right"),
    ],
)
def test_faults_of_api_classes_end_one_sample_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls, score: float, says: str
) -> None:
    before = children()
    monkeypatch.setattr(api_process, "CALL_SECONDS", 0.3 if ("sleep", "{}") in calls else 20.0)
    outcome, _ = play(multi_turn(data=faulty(tmp_path)), "multi_turn_base_0", [calls, []])
    assert (outcome.score, says in outcome.detail["reason"]) == (score, True), outcome
    written = tmp_path / "func_source_code" / "written"
    assert not written.exists() or written.stat().st_size == 0
    assert children() == before
    if ("fork", "{}") in calls:
        wait_for_end(int(outcome.detail["turns"][0][0]["results"][1]))


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_classes_that_cannot_be_loaded_are_no_fault_of_the_model(tmp_path: Path) -> None:
    before = children()
    task = multi_turn(data=faulty(tmp_path, broken=True))
    with pytest.raises(api_process.ApiFault, match="no such scenario"):
        play(task, "multi_turn_base_0", [[("work", "{}")]])
    assert children() == before


def test_a_missing_package_is_reported_before_the_first_request(tmp_path: Path) -> None:
    task = multi_turn(data=faulty(tmp_path, "import not_there_at_all\n" + FAULTY))
    with pytest.raises(ConfigError, match=r"FaultyAPI .* pip install not_there_at_all"):
        asyncio.run(task.prepare())


def test_the_process_ends_with_its_parent(tmp_path: Path) -> None:
    program = """
import asyncio, sys
from pathlib import Path
from chorale.evaluation.tasks.bfcl.api_process import open_apis
from chorale.evaluation.tasks.bfcl.entries import load_entries
from chorale.evaluation.tasks.bfcl.source import find_files
async def main():
    files = find_files(Path(sys.argv[1]))
    async with open_apis(files, load_entries(files, "multi_turn_base")[0]) as apis:
        task = asyncio.create_task(apis.call("model", ["sleep()"]))
        await asyncio.sleep(0.1)  # the request is in the pipe
        print(apis._process.pid, flush=True)
        await task
asyncio.run(main())
"""
    argv = [sys.executable, "-c", program, str(faulty(tmp_path))]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    wait_for_end(pid)


def wait_for_end(pid: int) -> None:
    """Waits until the process has ended, or nothing but its exit status is left."""
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, f"process {pid} is still alive"
        time.sleep(0.02)
