"""Random requests against the whole app: drawn from its OpenAPI description, and mutated from good ones.

    python scripts/fuzz_api.py --requests 20000 --seed 1

No answer may be a 5xx, take longer than ``TIMEOUT``, or be malformed: errors have the API's own form, bodies
are JSON, streams end as their API specifies. schemathesis draws a quarter of the requests from /openapi.json,
valid and invalid ones, and half of these get a valid prompt. The others are good requests with one to three
changes, which get past more of the validation, and reads of stored objects with odd query strings.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import copy
import gc
import json
import random
import re
import time
from typing import Any

import httpx2
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import booleans
from schemathesis import GenerationMode

from chorale.api.app import create_app
from chorale.api.openapi import describe
from chorale.api.operations import OPERATIONS
from chorale.engine.types import GenerateRequest
from chorale.harmony.vocab import load_vocabulary
from tests.support.engine.scripted_client import Script, ScriptedClient
from tests.support.faces import FACES, WEATHER, Call, request_body
from tests.support.scripted_tools import ScriptedService
from tests.support.server import make_state
from tests.support.wire.recorder import Recorder
from tests.support.wire.responses_scenarios import ITEMS
from tests.support.wire.scenarios import ALL, errors
from tests.support.wire.server import served

TIMEOUT = 60.0  # seconds, enough for bodies of up to 16 MB on a busy machine
_TURNS = (
    "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>",
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
    "<|channel|>final<|message|>{}<|return|>",
    "<|channel|>analysis<|message|>only<|return|>",
    "<|channel|>commentary to=functions.note<|message|>text<|call|>",
    "<|channel|>final<|message|>cut",
    "junk <|message|> <|start|><|call|>",
)
_ENDS = {
    "/v1/responses": ("response.completed", "response.incomplete", "response.failed"),
    "/v1/messages": ("message_stop", "error"),
}
_CHAT = {"messages": [{"role": "user", "content": "hello"}]}
# Valid values where the description allows any object; without them no drawn request reaches the engine.
SOUND: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": {"prompt": "hello"},
    "/v1/messages": {**_CHAT, "max_tokens": 50},
    "/v1/responses": {"input": "hello"},
}
# Fields whose random values are refused: ids of missing objects, and values that must match other fields.
_UNSOUND = {
    *("conversation", "previous_response_id", "prompt", "best_of"),
    *("modalities", "continue_final_message", "stream_options"),
}
# Values that most fields refuse.
POOL: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, -1e308, float("nan"), float("inf")),
    *("", "x", "auto", "\x00", "\ud800", "\u202e\U0001f600", "<|end|><|start|>system", "{" * 70, "x" * 5000),
    *([], [[]], [None], {}, {"": ""}, {"$ref": "#"}, {"pattern": "(?=a)"}, {"id": "x", "name": 5}),
    *({"type": None}, {"type": []}, {"type": {}}, {"type": "function"}, {"type": "object", "properties": []}),
    {"role": "user", "content": 5},
]
_SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["x"], "logit_bias": {"5": 1.5}, "min_p": 0.1,
    "top_k": 5, "presence_penalty": 0.1, "bad_words": ["bad"], "priority": 1, "cache_salt": "s",
    "stop_token_ids": [5], "min_tokens": 1, "n": 2,
}  # fmt: skip
_HISTORY = ("hi", Call(thought="T."), ("assistant", "Wait.", "T."), "and?")
_ITEMS = list(ITEMS[:20])  # as many as a conversation takes at once
_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search", "filters": {"allowed_domains": ["a.b"]}, "search_context_size": "low"},
    {"type": "code_interpreter", "container": {"type": "auto", "memory_limit": "1g"}},
    {"type": "mcp", "server_label": "srv", "server_url": "http://127.0.0.1:1/mcp", "headers": {"a": "b"},
     "allowed_tools": ["echo"], "require_approval": "never"},
]  # fmt: skip
_QUERIES = (
    "stream", "starting_after", "include", "include[]", "include_obfuscation", "after", "limit", "order",
)  # fmt: skip
_VALUES = ("true", "1", "-1", "9" * 30, "", "x", "é", "asc", "desc", "resp_" + "0" * 32, "\x00", "٣")


def engine() -> ScriptedClient:
    """Returns a client that plays one of a few turns, chosen by the prompt."""
    vocab = load_vocabulary()
    turns = [vocab.encode_with_special(text) for text in _TURNS]

    def source(request: GenerateRequest, index: int) -> Script:
        turn = turns[(sum(request.prompt_token_ids) + index) % len(turns)]
        return Script(turn, with_logprobs=request.sampling.logprobs is not None, tokens_per_step=3)

    return ScriptedClient(source)


class Fuzzer:
    """One app, called in process. ``faults``: each fault with a request that causes it."""

    def __init__(self, http: httpx2.AsyncClient, runner: asyncio.Runner) -> None:
        self._http, self._runner = http, runner
        self.statuses: collections.Counter[int] = collections.Counter()
        self.drawn: collections.Counter[str] = collections.Counter()  # paths of drawn requests with an answer
        self.faults: dict[str, str] = {}
        self.slowest = 0.0

    def send(self, method: str, path: str, **request: Any) -> int | None:
        """Sends a request. Returns the status, or None if it cannot be sent."""
        if "json" in request:  # serialised here, so that the time does not count for the server
            request["content"] = json.dumps(request.pop("json")).encode("utf-8", "surrogatepass")
        if request.get("files"):  # a number is not a file: the client would fail
            request["files"] = [
                (name, (label, value if isinstance(value, bytes) else str(value)))
                for name, (label, value, *_) in request["files"]
            ]
        started = time.perf_counter()
        try:
            work = asyncio.wait_for(self._http.request(method, path, **request), TIMEOUT)
            response = self._runner.run(work)
        except TimeoutError:
            self._fault("hangs", method, path, request)
            return None
        except (httpx2.InvalidURL, UnicodeEncodeError):
            return None  # cannot be put on a wire
        self.slowest = max(self.slowest, time.perf_counter() - started)
        self.statuses[response.status_code] += 1
        wrong = judge(path, response)
        if wrong is not None:
            self._fault(wrong, method, path, request)
        return response.status_code

    def _fault(self, wrong: str, method: str, path: str, request: dict[str, Any]) -> None:
        kind = f"{method} {path.split('?')[0][:40]}: {wrong}"
        self.faults.setdefault(kind, repr(request)[:1500])


def judge(path: str, response: httpx2.Response) -> str | None:
    """Returns the fault of an answer, or None."""
    if response.status_code >= 500:
        return f"status {response.status_code}: {re.sub('req_[0-9a-f]+', '', response.text)[:200]}"
    kind = response.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        return _judge_stream(path, response.text)
    if response.status_code < 400:
        return _judge_json(response) if kind.startswith("application/json") else None
    try:
        error = response.json()["error"]
        well = isinstance(error["message"], str) and isinstance(error["type"], str) and error["message"]
    except (ValueError, KeyError, TypeError):
        well = False
    return None if well else f"malformed error {response.text[:200]}"


def _judge_json(response: httpx2.Response) -> str | None:
    try:
        response.json()
    except ValueError:
        return "the body is not JSON"
    return None


def _judge_stream(path: str, text: str) -> str | None:
    if not text.endswith("\n\n"):
        return "the stream is cut"
    last = text.rstrip("\n").rpartition("\n\n")[2]
    ends = next((names for start, names in _ENDS.items() if path.startswith(start)), None)
    if ends is None:
        return None if last == "data: [DONE]" else "the stream has no [DONE]"
    kind = json.loads(last.rpartition("data: ")[2]).get("type")
    return None if kind in ends else f"the stream ends with {kind}"


# --------------------------------------------------------------------------- from the description


def described() -> list[Any]:
    """Returns schemathesis's operations."""
    return [found.ok() for found in schemathesis.openapi.from_dict(describe(OPERATIONS)).get_all_operations()]


def generated(fuzzer: Fuzzer, operations: list[Any], count: int, number: int) -> None:
    """Sends valid and invalid requests that schemathesis draws from the OpenAPI description."""
    with_body = [operation for operation in operations if operation.body]
    per_operation = max(1, count // (2 * len(with_body)))
    for operation in operations:
        share = per_operation if operation.body else max(1, min(per_operation, 50))
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and not operation.body:
                continue
            _draw(operation.as_strategy(generation_mode=mode), fuzzer, share, number)


def _draw(strategy: Any, fuzzer: Fuzzer, count: int, number: int) -> None:
    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=strategy, as_drawn=booleans())
    def run(case: Any, as_drawn: bool) -> None:
        request = case.as_transport_kwargs(base_url="http://localhost")
        request.pop("cookies", None)
        body = request.get("json")
        if isinstance(body, dict) and isinstance(body.get("model"), str):
            request["json"] = {**body, "model": "demo"}  # any other name ends the request at once
        if isinstance(request.get("data"), str | bytes):
            request["content"] = request.pop("data")
        url, method = request.pop("url"), request.pop("method")
        path = url.removeprefix("http://localhost")
        if path in SOUND and not as_drawn and isinstance(request.get("json"), dict):
            kept = {key: value for key, value in request["json"].items() if key not in _UNSOUND}
            request["json"] = kept | SOUND[path]
        if fuzzer.send(method, path, **request) == 200:
            fuzzer.drawn[path] += 1

    run()


# --------------------------------------------------------------------------- from good requests


async def good_requests() -> list[tuple[str, Any]]:
    """Returns (path, body) of the wire tests' successful requests, and of some longer requests."""
    recorder = Recorder()
    for scenario in ALL:
        if scenario is errors:
            continue
        async with served(recorder, unknown_fields="warn") as server:
            await scenario(server)
    asked = dict.fromkeys((each.path, each.source.partition(": ")[2]) for each in recorder.exchanges)
    found = [(path, json.loads(body)) for path, body in asked if len(body) > len("{}")]
    long = {
        face: request_body(face, history=_HISTORY, instructions="Be brief.", functions=[WEATHER])
        for face in FACES
    }
    return [
        *found,
        ("/v1/chat/completions", long["chat"]),
        ("/v1/chat/completions", {**_CHAT, **_SAMPLING}),
        (
            "/v1/completions",
            {"prompt": ["a", "b"], "structured_outputs": {"choice": ["a", "b"]}, **_SAMPLING},
        ),
        ("/v1/responses", long["responses"]),
        ("/v1/responses", {"input": "hi", "previous_response_id": "resp_" + "0" * 32}),
        ("/v1/messages", long["messages"]),
        ("/v1/messages/count_tokens", {"messages": long["messages"]["messages"], "system": "Be brief."}),
        ("/tokenize", {"messages": long["chat"]["messages"], "return_token_strs": True}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [1, 2, 3]}),
    ]


async def stored_objects(http: httpx2.AsyncClient) -> tuple[list[tuple[str, Any]], list[str]]:
    """Makes a conversation and a response. Returns good requests that need them, and paths to read them."""
    made = (await http.post("/v1/conversations", json={"items": _ITEMS[:2]})).json()["id"]
    asked = {"input": "x", "background": True}
    response = (await http.post("/v1/responses", json=asked)).json()["id"]
    requests = [
        (f"/v1/conversations/{made}", {"metadata": {"a": "b"}}),
        (f"/v1/conversations/{made}/items", {"items": _ITEMS, "include": []}),
        ("/v1/responses", {"input": _ITEMS, "tools": _TOOLS, "conversation": {"id": made}}),
        ("/v1/responses", {"input": "x", "tools": _TOOLS, "tool_choice": "auto", "background": True}),
        ("/v1/responses/compact", {"model": "demo", "input": _ITEMS, "instructions": "x"}),
        ("/v1/chat/completions", {**_CHAT, "tools": _TOOLS}),
        ("/v1/chat/completions", {**_CHAT, "web_search_options": {"search_context_size": "low"}}),
    ]
    one, items = f"/v1/responses/{response}", f"/v1/conversations/{made}/items"
    return requests, [one, f"{one}/input_items", items, "/v1/conversations/é", "/v1/responses/x/input_items"]


def read_oddly(fuzzer: Fuzzer, paths: list[str], count: int, number: int) -> None:
    """Reads stored objects with odd query strings."""
    chance = random.Random(number)
    for _ in range(count):
        query = {chance.choice(_QUERIES): chance.choice(_VALUES) for _ in range(chance.randrange(3))}
        fuzzer.send("GET", chance.choice(paths), params=query)


def mutated(fuzzer: Fuzzer, seeds: list[tuple[str, Any]], count: int, number: int) -> None:
    """Sends good requests with one to three changes."""
    chance = random.Random(number)
    for _ in range(count):
        path, good = chance.choice(seeds)
        body = copy.deepcopy(good)
        for _ in range(chance.randint(0, 3)):
            body = mutate(body, seeds, chance)
        try:
            content = json.dumps(body).encode()
        except ValueError:
            continue
        fuzzer.send("POST", path, content=content, headers={"content-type": "application/json"})


def places(value: Any) -> list[tuple[Any, Any]]:
    """Returns every (container, key) within a JSON value."""
    found: list[tuple[Any, Any]] = []
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found.append((value, key))
        found += places(value[key])
    return found


def mutate(body: Any, seeds: list[tuple[str, Any]], chance: random.Random) -> Any:
    """Returns ``body`` with one change: a value replaced, removed, wrapped, or a key added."""
    spots = places(body)
    if not spots:
        return chance.choice(POOL)
    container, key = chance.choice(spots)
    holder, other = chance.choice(places(chance.choice(seeds)[1]))  # a value of another request, and its name
    value = copy.deepcopy(chance.choice([holder[other], chance.choice(POOL)]))
    way = chance.randrange(5)
    if way == 0:
        del container[key]
    elif way == 1:
        container[key] = [container[key]]
    elif way == 2:
        container[key] = {"type": container[key]}
    elif way == 3 and isinstance(container, list):
        container.append(value)
    elif way == 3 and isinstance(other, str):
        container[other] = value
    else:
        container[key] = value
    return body


# --------------------------------------------------------------------------- runs


def fuzz(count: int, number: int) -> Fuzzer:
    """Sends ``count`` requests, a quarter of them drawn from the description."""
    # Before Python 3.11.8, parsing inside another parse fails (gh-106905), for example in a finalizer that
    # writes a traceback. So earlier objects are finalized now, and schemathesis's modules, which pytest
    # parses to rewrite them, are imported here.
    gc.collect()
    operations = described()
    with asyncio.Runner() as runner:
        seeds = runner.run(good_requests())
        stack = contextlib.AsyncExitStack()
        served_with_tools = make_state(engine(), tool_service=ScriptedService())
        state = runner.run(stack.enter_async_context(served_with_tools))
        transport = httpx2.ASGITransport(app=create_app(state), raise_app_exceptions=False)
        http = httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=None)
        runner.run(stack.enter_async_context(http))
        fuzzer = Fuzzer(http, runner)
        of_stored, paths = runner.run(stored_objects(http))
        generated(fuzzer, operations, count // 4, number)
        read_oddly(fuzzer, paths, count // 8, number)
        # Half of the changed requests are about stored objects and built-in tools.
        seeds += of_stored * (len(seeds) // len(of_stored))
        mutated(fuzzer, seeds, count - sum(fuzzer.statuses.values()), number)
        runner.run(stack.aclose())
        return fuzzer
