"""``chorale serve demo --speculative-config``: the same answers in fewer steps, and metrics that say so."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.deploy.promql import all_faults, queries
from tests.support.served import Served, at_once, serving

CONFIG = '{"method": "ngram", "num_speculative_tokens": 4}'
COUNTER = "vllm:spec_decode_num"
TEXT = "red apple, green pear, blue plum, yellow melon, brown date, orange lemon, purple fig, pink peach"
REQUESTS: list[dict[str, Any]] = [
    {"content": f"Repeat: {TEXT}", "temperature": 0},
    {"content": f"Repeat: {TEXT}", "temperature": 1, "seed": 11},
    {"content": "What is 17 + 25?", "temperature": 1, "seed": 3, "n": 2},
]


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("drafting")
    with serving("demo", folder, "--speculative-config", CONFIG, "--log-stats-interval", "0.5") as server:
        yield server


def answers(server: Served, requests: list[dict[str, Any]] = REQUESTS) -> list[Any]:
    client = server.client()

    def ask(request: dict[str, Any]) -> Any:
        fields = {name: value for name, value in request.items() if name != "content"}
        messages: Any = [{"role": "user", "content": request["content"]}]
        return client.chat.completions.create(model="demo", messages=messages, max_tokens=200, **fields)

    found: list[Any] = []
    for answer in at_once(*(partial(ask, request) for request in requests)):
        found += [(choice.message.content, choice.finish_reason) for choice in answer.choices]
        assert answer.usage is not None
        found.append(answer.usage.completion_tokens)
    return found


def test_drafts_are_accepted_and_counted(drafting: Served) -> None:
    """That they change no answer is shown in ``claims/test_drafts.py``."""
    found = answers(drafting)
    assert "red apple, green pear, blue plum" in found[0][0]
    drafted, accepted = (drafting.metric(f"{COUNTER}_{name}_tokens_total") for name in ("draft", "accepted"))
    assert 15 < accepted <= drafted
    assert drafting.metric(f"{COUNTER}_accepted_tokens_per_pos_total") == accepted
    tokens = sum(each for each in found if isinstance(each, int))
    assert drafting.metric("vllm:generation_tokens_total") == tokens
    assert drafting.metric(f"{COUNTER}_drafts_total") <= drafting.metric("chorale:engine_steps_total")
    # The first ones of four choices have no latency.
    assert drafting.metric("vllm:inter_token_latency_seconds_count") == tokens - 4


def test_banner_and_log_say_what_is_on(drafting: Served) -> None:
    answers(drafting, REQUESTS[:1])
    assert "drafts    ngram, up to 4 draft tokens" in drafting.log.read_text()
    drafting.wait_until("the line", lambda: "SpecDecoding metrics: Mean acc" in drafting.log.read_text())


def test_dashboard_alerts_and_autoscalers_ask_for_metrics_of_this_server(drafting: Served) -> None:
    """This server has those of speculation, too. Names, types and labels must agree (``promql.py``)."""
    drafting.client().completions.create(model="demo", prompt="a", max_tokens=2)
    with urllib.request.urlopen(f"{drafting.url}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    assert len(list(queries())) > 60
    assert all_faults(text) == []
