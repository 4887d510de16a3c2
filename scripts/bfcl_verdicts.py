"""Compares Chorale's BFCL task with bfcl_eval's own code: prompts, tools, conversations and verdicts.

Model outputs are generated from the expected answers, right and wrong in many ways. Run it in an environment
of its own, since bfcl_eval pins its many dependencies; what it imports of other vendors is replaced by mocks:

    python -m venv /tmp/bfcl
    /tmp/bfcl/bin/pip install --no-deps bfcl-eval==2026.3.23
    /tmp/bfcl/bin/pip install filelock openai httpx tenacity overrides tqdm python-dotenv mpmath numpy pandas
    PYTHONPATH=. /tmp/bfcl/bin/python scripts/bfcl_verdicts.py --data WHEEL [--per-entry 2] [--seed 0]

``--data sample --record tests/evaluation/bfcl/verdicts.json`` makes the record that the tests replay.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import collections
import copy
import importlib.abc
import importlib.machinery
import io
import json
import os
import random
import sys
import tempfile
import types
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from chorale.evaluation.task import Reply, ToolCall
from chorale.evaluation.tasks.bfcl import conversation
from chorale.evaluation.tasks.bfcl.api_process import open_apis
from chorale.evaluation.tasks.bfcl.calls import as_python, read_calls
from chorale.evaluation.tasks.bfcl.categories import CATEGORIES, RELEVANCE, is_multi_turn
from chorale.evaluation.tasks.bfcl.entries import Entry, load_entries
from chorale.evaluation.tasks.bfcl.schema import to_tools
from chorale.evaluation.tasks.bfcl.source import BfclFiles, find_files
from chorale.evaluation.tasks.bfcl.task import _check

VENDORS = {
    *("anthropic", "bs4", "boto3", "botocore", "cohere", "databricks", "datamodel_code_generator", "faiss"),
    *("fireworks", "google", "html2text", "huggingface_hub", "mistralai", "networkx", "qwen_agent"),
    *("rank_bm25", "sentence_transformers", "serpapi", "tabulate", "torch", "transformers", "tree_sitter"),
    *("tree_sitter_java", "tree_sitter_javascript", "vllm", "writerai"),
}
MODEL = "gpt-4o-2024-11-20-FC"  # a model of theirs whose functions' dots become underscores
_NO_CALLS = "ast_decoder:decoder_failed"  # they have two kinds of it
Calls = list[tuple[str, str]]  # name, arguments as the server sends them


# ---------------------------------------------------------------------- their side


class _Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in VENDORS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: MagicMock(name=name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Theirs:
    """bfcl_eval's handler of Chat Completions, loader and checkers."""

    def __init__(self) -> None:
        os.environ |= {"BFCL_PROJECT_ROOT": tempfile.mkdtemp(), "OPENAI_API_KEY": "unused"}
        sys.meta_path.insert(0, _Mocks())
        from bfcl_eval import utils
        from bfcl_eval.constants import executable_backend_config
        from bfcl_eval.eval_checker import eval_runner
        from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler

        self.utils, self.runner = utils, eval_runner
        self.classes = executable_backend_config.CLASS_FILE_PATH_MAPPING
        self.handler = OpenAICompletionsHandler(MODEL, 0.001, MODEL, True)

    def use_sample(self, files: BfclFiles) -> None:
        """Makes the sample's API classes and data known to their loader."""
        sys.path.insert(0, files.import_path)
        from bfcl_eval.constants import eval_config, executable_backend_config

        for name in ("HouseAPI", "PantryAPI", "ScaleAPI"):
            self.classes[name] = files.module(name)
            executable_backend_config.MULTI_TURN_FUNC_DOC_FILE_MAPPING[name] = f"{files.module(name)}.json"
        executable_backend_config.STATELESS_CLASSES.append("ScaleAPI")
        for module in (self.utils, eval_config):
            module.PROMPT_PATH = Path(str(files.data))
            module.MULTI_TURN_FUNC_DOC_PATH = Path(str(files.data)) / "multi_turn_func_doc"

    def single(self, entry: Entry, row: dict[str, Any], calls: Calls) -> tuple[bool, str]:
        result: Any = [{name: arguments} for name, arguments in calls] or "no call"
        args = (self.handler, entry.id, result)
        if entry.category in RELEVANCE:
            found = self.runner._evaluate_single_relevance_entry(*args, row, MODEL, entry.category)
        else:
            language = self.runner.Language(entry.language)
            found = self.runner._evaluate_single_ast_entry(
                *args, entry.answer, row, MODEL, entry.category, language, None
            )
        kind = found.get("error_type", "")
        return found["valid"], _NO_CALLS if kind.startswith("ast_decoder:") else kind

    def multi(self, entry: Entry, row: dict[str, Any], turns: list[list[Calls]]) -> tuple[bool, str]:
        """A new model name for each case: their instances are global, by model and test case."""
        self.count = getattr(self, "count", 0) + 1
        results = [[[{n: a} for n, a in step] or "no call" for step in turn] + ["no call"] for turn in turns]
        found = self.runner._evaluate_single_multi_turn_entry(
            self.handler,
            entry.id,
            results,
            entry.answer,
            copy.deepcopy(row),
            f"m{self.count}",
            entry.category,
        )
        return found["valid"], "" if found["valid"] else found["error"]["error_type"]

    def converse(self, row: dict[str, Any], script: list[Calls]) -> list[Any]:
        """Returns the requests of their multi-turn loop with a model that sends the script's replies."""
        sent: list[Any] = []
        left = iter(script)

        def query(data: dict[str, Any]) -> tuple[Any, float]:
            request = json.dumps([[_plain(m) for m in data["message"]], data["tools"]])
            sent.append(json.loads(request.replace(self.handler.model_name_underline_replaced, "model")))
            return _api_reply(next(left, []), len(sent)), 0.0

        self.handler._query_FC = query
        self.count = getattr(self, "count", 0) + 1
        self.handler.model_name_underline_replaced = f"model_of_case_{self.count}"
        with redirect_stdout(io.StringIO()):
            self.handler.inference_multi_turn_FC(copy.deepcopy(row), False, True)
        return sent


def _api_reply(calls: Calls, number: int) -> Any:
    calls_ = [
        types.SimpleNamespace(id=f"c{number}-{i}", function=types.SimpleNamespace(name=n, arguments=a))
        for i, (n, a) in enumerate(calls)
    ]
    message = types.SimpleNamespace(tool_calls=calls_ or None, content=None if calls_ else "done")
    usage = types.SimpleNamespace(prompt_tokens=1, completion_tokens=1)
    return types.SimpleNamespace(choices=[types.SimpleNamespace(message=message)], usage=usage)


def _plain(message: Any) -> Any:
    if isinstance(message, dict):
        return message
    plain: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": c.id,
                "type": "function",
                "function": {"name": c.function.name, "arguments": c.function.arguments},
            }
            for c in message.tool_calls
        ]
    return plain


# ---------------------------------------------------------------------- our side


def _reply(calls: Calls, number: int = 0) -> Reply:
    made = tuple(ToolCall(f"c{number}-{i}", name, text) for i, (name, text) in enumerate(calls))
    return Reply("" if made else "done", tool_calls=made)


def ours_single(entry: Entry, calls: Calls) -> tuple[bool, str]:
    fault = _check(entry, read_calls(_reply(calls)))
    return fault is None, "" if fault is None else fault.kind


async def ours_multi(files: BfclFiles, entry: Entry, turns: list[list[Calls]]) -> tuple[bool, str]:
    steps = [[read_calls(_reply(step)) for step in turn] for turn in turns]
    python = [[[as_python(call) for call in step] for step in turn if step] for turn in steps]
    async with open_apis(files, entry) as apis:
        fault = await conversation.check_turns(apis, python, entry.answer)
    return fault is None, "" if fault is None else fault.kind


class _Scripted:
    def __init__(self, script: list[Calls]) -> None:
        self.sent: list[Any] = []
        self._left = iter(script)

    async def ask(self, messages: Any, *, tools: Any = None, **_: Any) -> Reply:
        self.sent.append(copy.deepcopy([list(messages), tools]))
        return _reply(next(self._left, []), len(self.sent))


async def ours_converse(files: BfclFiles, entry: Entry, script: list[Calls]) -> list[Any]:
    session = _Scripted(script)
    async with open_apis(files, entry) as apis:
        await conversation._play(entry, session, apis, conversation.Played())
    return session.sent


# ---------------------------------------------------------------------- outputs of a model


def right_calls(entry: Entry, rng: random.Random) -> Calls:
    calls = []
    for answer in entry.answer:
        ((name, accepted),) = answer.items()
        arguments = {key: rng.choice(values or [""]) for key, values in accepted.items()}
        kept = {key: _chosen(value, rng) for key, value in arguments.items() if value != ""}
        if entry.language != "python":
            kept = {key: _literal(value, entry, name, key) for key, value in kept.items()}
        calls.append((name.replace(".", "_"), kept))
    return [(name, json.dumps(arguments)) for name, arguments in calls]


def _chosen(value: Any, rng: random.Random) -> Any:
    """An accepted object has lists of values; one of each is taken, or the member is left out."""
    if isinstance(value, dict):
        picked = {k: rng.choice(v) if isinstance(v, list) and v else v for k, v in value.items()}
        return {key: item for key, item in picked.items() if item != ""}
    if isinstance(value, list):
        return [_chosen(item, rng) for item in value]
    return value


def _literal(value: Any, entry: Entry, function: str, parameter: str) -> Any:
    schema = next(f for f in entry.functions if f["name"] == function)["parameters"]["properties"]
    return _as_literal(value, schema.get(parameter, {}).get("type", "any"), entry.language == "java")


def _as_literal(value: Any, kind: str, java: bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        parts = ", ".join(_as_literal(v, "", java) if not isinstance(v, str) else f'"{v}"' for v in value)
        if not java:
            return f"[{parts}]"
        return (
            f"new ArrayList<>(Arrays.asList({parts}))" if kind == "ArrayList" else f"new Object[]{{{parts}}}"
        )
    if isinstance(value, dict):
        if not java:
            return json.dumps(value)
        puts = " ".join(
            f'put("{k}", {_as_literal(v, "", java) if not isinstance(v, str) else json.dumps(v)});'
            for k, v in value.items()
        )
        return f"new HashMap<String, Object>() {{{{ {puts} }}}}"
    suffix = {"long": "L", "float": "f" if java else "", "Bigint": "n"}.get(kind, "")
    return f"{value}{suffix}" if isinstance(value, int | float) else str(value)


def _other(value: Any, rng: random.Random) -> Any:
    """Returns a value that differs a little, or in its type, or only in its form."""
    if isinstance(value, bool):
        return rng.choice([not value, int(value), str(value).lower()])
    if isinstance(value, int | float):
        return rng.choice([value + 1, float(value), int(value), str(value), -value, [value], value == 1])
    if isinstance(value, str):
        return rng.choice([
            value.upper(), value + ".", value.replace(" ", ""), value + "x", "", [value], 0, {"a": value},
            value.replace("'", '"'), f'"{value}"', f"'{value}'", value[::-1], "new int[]{1, 2}", "[1, 2]",
            "new ArrayList<>()", "{}", "7L", "1.5f", "1e3", "true", "12n", "[[1, 2], [3, 4]]",
            "{'a': [1, 'b']}", "new Array(1, 'a', true)", "new HashMap<>()",
            "new ArrayList<Integer>() {{ add(1); add(2); }}",
        ])  # fmt: skip
    if isinstance(value, list):
        if value and rng.random() < 0.5:
            place = rng.randrange(len(value))
            return [*value[:place], _other(value[place], rng), *value[place + 1 :]]
        return rng.choice([value[::-1], value + value[:1], value[1:], [], str(value), {"a": value}])
    if isinstance(value, dict):
        if value and rng.random() < 0.6:
            key = rng.choice(list(value))
            return value | {key: _other(value[key], rng)}
        return rng.choice([value | {"more": 1}, dict(list(value.items())[1:]), {}, str(value), [value]])
    return 1


def changed(calls: Calls, rng: random.Random) -> Calls:
    """Returns the calls with one change, which may be harmless."""
    if not calls:
        return [("made_up", "{}")]
    place = rng.randrange(len(calls))
    name, text = calls[place]
    arguments = json.loads(text)
    kind = rng.choice(
        ["value"] * 6 + ["drop", "add", "name", "less", "more", "order", "text", "null", "args"]
    )
    if kind == "value" and arguments:
        key = rng.choice(list(arguments))
        arguments[key] = _other(arguments[key], rng)
    elif kind == "drop" and arguments:
        del arguments[rng.choice(list(arguments))]
    elif kind == "null" and arguments:
        arguments[rng.choice(list(arguments))] = None
    elif kind == "add":
        arguments[rng.choice(["made_up", "unit", "mode"])] = rng.choice([1, "x"])
    elif kind == "name":
        name = rng.choice([name + "_", name.upper(), "made_up"])
    new = (name, rng.choice(["[1]", "{", "", "null"]) if kind == "args" else json.dumps(arguments))
    result = [*calls[:place], new, *calls[place + 1 :]]
    if kind == "less":
        del result[place]
    if kind == "more":
        result.append(rng.choice(calls))
    if kind == "order":
        rng.shuffle(result)
    return [] if kind == "text" else result


def right_turns(entry: Entry, rng: random.Random) -> list[list[Calls]]:
    """Returns the expected calls of each turn, divided into steps at random."""
    turns = []
    for calls in entry.answer:
        steps: list[Calls] = []
        for text in calls:
            call = _from_python(text, entry)
            if steps and rng.random() < 0.4:
                steps[-1].append(call)
            else:
                steps.append([call])
        turns.append(steps)
    return turns


def _from_python(text: str, entry: Entry) -> tuple[str, str]:
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    functions = [*entry.functions, *(f for added in entry.added.values() for f in added)]
    described = next((f for f in functions if f["name"] == call.func.id), None)
    names = list(described["parameters"]["properties"]) if described else []
    arguments = dict(zip(names, (ast.literal_eval(a) for a in call.args), strict=False))
    arguments |= {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    return call.func.id, json.dumps(arguments)


def changed_turns(turns: list[list[Calls]], entry: Entry, rng: random.Random) -> list[list[Calls]]:
    turns = copy.deepcopy(turns)
    place = rng.randrange(len(turns))
    turn = turns[place]
    kind = rng.choice(["change", "change", "change", "drop", "empty", "again", "extra", "early", "end"])
    if kind in ("change", "drop", "again") and turn:
        step = rng.randrange(len(turn))
        if kind == "change":
            turn[step] = changed(turn[step], rng)
        elif kind == "drop":
            del turn[step]
        else:
            turn.insert(step, copy.deepcopy(turn[step]))
    elif kind == "empty":
        turns[place] = []
    elif kind == "extra":
        function = rng.choice(entry.functions)
        turn.append([(function["name"], "{}")])
    elif kind == "early" and place + 1 < len(turns):
        turns[place] = turn + turns[place + 1]
        turns[place + 1] = []
    elif kind == "end":
        turns = turns[: place + 1]  # as after too many steps
    return turns


def script_of(turns: list[list[Calls]], rng: random.Random) -> list[Calls]:
    """Returns the replies of a conversation: steps, and an empty reply to end a turn; sometimes endless."""
    script: list[Calls] = []
    for turn in turns:
        script += [*turn, []] if not turn or not any(_unreadable(step) for step in turn) else [[]]
    if rng.random() < 0.05 and turns[0]:
        return [turns[0][0]] * 40
    return script


def _unreadable(step: Calls) -> bool:
    return read_calls(_reply(step)) is None


# ---------------------------------------------------------------------- the comparison


class Count:
    def __init__(self) -> None:
        self.same: collections.Counter[str] = collections.Counter()
        self.right: collections.Counter[str] = collections.Counter()
        self.kinds: collections.Counter[str] = collections.Counter()
        self.different: list[str] = []
        self.crashed: collections.Counter[str] = collections.Counter()

    def add(self, what: str, ours: Any, theirs: Any, case: Any) -> None:
        if ours == theirs:
            self.same[what] += 1
        else:
            self.different.append(
                f"{what}: ours {str(ours)[:300]}, theirs {str(theirs)[:300]}: {str(case)[:600]}"
            )


def compare_prompts(theirs: Theirs, entries: list[Entry], category: str, count: Count) -> None:
    """Compares what the model reads: descriptions with hints, and tools."""
    from bfcl_eval.constants.enums import ModelStyle
    from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI
    from bfcl_eval.model_handler.utils import convert_to_tool

    for entry, row in zip(entries, theirs.utils.load_dataset_entry(category), strict=True):
        added = {int(turn): functions for turn, functions in row.get("missed_function", {}).items()}
        count.add("descriptions", (entry.shown, dict(entry.added)), (row["function"], added), entry.id)
        tools = convert_to_tool(row["function"], GORILLA_TO_OPENAPI, ModelStyle.OPENAI_COMPLETIONS)
        for tool in tools:
            tool["function"].pop("response", None)
        count.add("tools", to_tools(entry.shown), tools, entry.id)


async def compare_multi(
    files: BfclFiles, theirs: Theirs, entry: Entry, rows: tuple[Any, Any], args: Any, count: Count
) -> list[Any]:
    rng = random.Random(f"{args.seed} {entry.id}")
    right = right_turns(entry, rng)
    recorded = []
    for turns in (right, *(changed_turns(right, entry, rng) for _ in range(args.per_entry))):
        judged = theirs.multi(entry, rows[0], turns)
        mine = await ours_multi(files, entry, [[s for s in turn if not _unreadable(s)] for turn in turns])
        count.add("verdicts multi_turn", mine, judged, (entry.id, turns))
        count.right[entry.category] += judged[0]
        count.kinds[judged[1]] += 1
        recorded.append([entry.id, turns, *judged])
    script = script_of(changed_turns(right, entry, rng) if rng.random() < 0.5 else right, rng)
    sent = theirs.converse(rows[1], script)
    for request in sent:
        for tool in request[1]:
            tool["function"].pop("response", None)
    count.add("conversations", await ours_converse(files, entry, script), sent, (entry.id, script))
    return recorded


def compare_single(theirs: Theirs, entry: Entry, row: Any, args: Any, count: Count) -> list[Any]:
    rng = random.Random(f"{args.seed} {entry.id}")
    named = [(f["name"].replace(".", "_"), "{}") for f in entry.functions]
    right = named[:1] if entry.category in RELEVANCE else right_calls(entry, rng)
    cases = [right]
    for _ in range(args.per_entry):
        case = changed(right, rng)
        cases.append(changed(case, rng) if rng.random() < 0.2 and not _unreadable(case) else case)
    recorded = []
    for calls in cases:
        try:
            judged = theirs.single(entry, copy.deepcopy(row), calls)
        except Exception as error:
            count.crashed[f"{type(error).__name__}: {error}"[:80]] += 1
            continue
        try:
            mine = ours_single(entry, calls)
        except Exception as error:
            mine = (False, repr(error))
        count.add("verdicts single_turn", mine, judged, (entry.id, calls, entry.answer))
        count.right[entry.category] += judged[0]
        count.kinds[judged[1]] += 1
        recorded.append([entry.id, calls, *judged])
    return recorded


async def compare(args: Any, recorded: dict[str, Any]) -> int:
    files = find_files(Path(args.data))
    theirs, count = Theirs(), Count()
    if args.data == "sample":
        theirs.use_sample(files)
    for category in args.category or CATEGORIES:
        entries = load_entries(files, category)
        compare_prompts(theirs, entries, category, count)
        load = theirs.utils.load_dataset_entry
        plain, hinted = load(category, include_language_specific_hint=False), load(category)
        for entry, *rows in list(zip(entries, plain, hinted, strict=True))[: args.limit]:
            if is_multi_turn(category):
                cases = await compare_multi(files, theirs, entry, (rows[0], rows[1]), args, count)
            else:
                cases = compare_single(theirs, entry, rows[0], args, count)
            recorded |= {json.dumps(case): None for case in cases}
    for name, number in sorted(count.same.items()):
        different = sum(line.startswith(f"{name}:") for line in count.different)
        print(f"{name}: {number} equal, {different} different")
    print("judged right:", dict(count.right))
    print("kinds of errors:", dict(count.kinds.most_common()))
    print("their checker raised:", dict(count.crashed))
    for line in count.different[:20]:
        print("DIFFERENT", line)
    return 1 if count.different else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares Chorale's BFCL task with bfcl_eval.")
    parser.add_argument("--data", required=True, help="the wheel, a folder, or sample")
    parser.add_argument("--per-entry", type=int, default=2, help="changed outputs for each test case")
    parser.add_argument("--category", action="append", help="only this category; may be repeated")
    parser.add_argument("--limit", type=int, default=None, help="test cases for each category")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", help="file for the cases with bfcl_eval's verdicts")
    args, recorded = parser.parse_args(), dict[str, Any]()
    code = asyncio.run(compare(args, recorded))
    if args.record:
        Path(args.record).write_text("[\n" + ",\n".join(recorded) + "\n]\n")
        print(f"{len(recorded)} cases in {args.record}")
    return code


if __name__ == "__main__":
    sys.exit(main())
