"""The application with the demo model, on a Ray cluster whose two nodes are local processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from tests.support import ROOT
from tests.support.event_loop import wait_until
from tests.support.ports import free_port
from tests.support.serve.ray_cluster import ray_cluster
from tests.support.store.postgres import postgres

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]
SMALL = {"model": "demo", "device": "cpu", "max-num-seqs": 16, "max-model-len": 2048, "shutdown-timeout": 60}
ASKED = {"model": "demo", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "seed": 5}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray.serve", reason="needs the extra ray")
    with ray_cluster(2) as made:
        yield made


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """PostgreSQL if it is installed, otherwise a file, which fronts on one machine can share."""
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(postgres())
        except pytest.skip.Exception:
            yield str(tmp_path_factory.mktemp("store") / "responses.db")


class Served:
    """The deployed application, and its clients."""

    def __init__(self, port: int, store: str) -> None:
        self.port, self._store = port, store
        self.url = f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="x", max_retries=0, timeout=120)

    async def ask_until(self, is_over: Callable[[], bool], max_tokens: int) -> int:
        """Asks again and again. Returns how often."""
        count = 0
        async with openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="x", max_retries=0, timeout=120
        ) as client:
            while not is_over():
                await client.chat.completions.create(**ASKED, max_tokens=max_tokens)
                count += 1
        return count

    def deploy(self, wait: bool = True, **more: Any) -> None:
        from ray import serve

        from chorale.serve.fleet import app

        args = SMALL | {"data-parallel-size": 2, "api-server-count": 2, "response-store": self._store, **more}
        serve._run(app(args), name="chorale", route_prefix="/", _blocking=wait)

    def facts(self) -> list[dict[str, Any]]:
        from ray import serve

        called = serve.get_deployment_handle("Engine", "chorale").broadcast("facts")
        found = called.results(timeout_s=30, return_exceptions=True)
        return [each for each in found if isinstance(each, dict)]

    def wait_for(self, what: str, condition: Any, seconds: float = 120) -> None:
        wait_until(condition, what, seconds)

    def ready_engines(self) -> int:
        import httpx2

        with contextlib.suppress(httpx2.HTTPError):
            answer = httpx2.get(f"{self.url}/health")
            if answer.status_code == 200:
                engines = answer.json()["engines"] if answer.content else [{"status": "ready"}]
                return sum(each["status"] == "ready" for each in engines)
        return 0


@pytest.fixture(scope="module")
def served(cluster: Any, store: str) -> Iterator[Served]:
    from ray import serve

    port = free_port()
    serve.start(proxy_location="EveryNode", http_options={"host": "127.0.0.1", "port": port})
    made = Served(port, store)
    made.deploy()
    made.wait_for("two engines", lambda: made.ready_engines() == 2)
    yield made
    with contextlib.suppress(Exception):  # a later test may have stopped Serve
        serve.delete("chorale")


def test_requests_streams_and_disconnects_leave_no_calls(served: Served) -> None:
    answer = served.client.chat.completions.create(**ASKED, max_tokens=60)
    text, _ = read_stream(served.client.chat.completions.create(**ASKED, max_tokens=60, stream=True))
    message = answer.choices[0].message
    assert text == (message.reasoning or "") + (message.content or "")
    # Each choice and each prompt of an HTTP request is a separate call for Ray.
    many = served.client.chat.completions.create(**ASKED, max_tokens=5, n=3)
    assert len(many.choices) == 3
    prompts = served.client.completions.create(model="demo", prompt=["a b", "c d", "e f"], max_tokens=5)
    assert len(prompts.choices) == 3
    for _ in range(4):  # clients that disconnect
        stream = served.client.chat.completions.create(**ASKED, max_tokens=1500, stream=True)
        next(iter(stream))
        stream.close()
    served.wait_for("no call is left", lambda: all(each["held"] == 0 for each in served.facts()), 20)


def read_stream(stream: Any) -> tuple[str, Any]:
    text, usage = "", None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += (choice.delta.content or "") + (getattr(choice.delta, "reasoning", None) or "")
    return text, usage


def test_ray_exports_metrics_with_the_names_of_vllm(served: Served) -> None:
    import httpx2
    import ray

    served.client.chat.completions.create(**ASKED, max_tokens=5)
    urls = [f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes()]
    wanted = {
        'deployment="Engine"': ("ray_vllm_num_requests_running", "ray_vllm_prompt_tokens_total"),
        'deployment="Front"': (
            "ray_vllm_request_success_total",
            "ray_vllm_time_to_first_token_seconds_bucket",
        ),
    }

    def exported() -> bool:
        lines = "\n".join(httpx2.get(f"{url}/metrics").text for url in urls).splitlines()
        return all(
            any(line.startswith(name + "{") and label in line for line in lines)
            for label, names in wanted.items()
            for name in names
        )

    served.wait_for("the series", exported, 60)


def test_any_front_can_retrieve_a_stored_response(served: Served) -> None:
    made = served.client.responses.create(model="demo", input="What is 2 + 3?", max_output_tokens=40)
    for _ in range(12):  # Ray chooses one of the two fronts for each request
        assert served.client.responses.retrieve(made.id).output == made.output
    following = served.client.responses.create(
        model="demo", input="And 3 + 4?", previous_response_id=made.id, max_output_tokens=20
    )
    assert following.previous_response_id == made.id


@pytest.mark.parametrize("victim", ["pid", "replica_pid"])
def test_streams_continue_when_an_engine_or_a_replica_is_killed(served: Served, victim: str) -> None:
    served.wait_for("two engines", lambda: served.ready_engines() == 2)
    request = ASKED | {"max_tokens": 300, "stream": True, "extra_body": {"ignore_eos": True}}
    wanted, _ = read_stream(served.client.chat.completions.create(**request))

    async def scene() -> list[str]:
        def streamed() -> str:
            return read_stream(served.client.chat.completions.create(**request))[0]

        reading = [asyncio.ensure_future(asyncio.to_thread(streamed)) for _ in range(4)]
        await asyncio.to_thread(
            served.wait_for, "running", lambda: sum(each["held"] for each in served.facts()) == 4
        )
        found = max(await asyncio.to_thread(served.facts), key=lambda each: each["held"])
        assert found["held"] > 0
        os.kill(found[victim], signal.SIGKILL)
        return await asyncio.gather(*reading)

    assert asyncio.run(scene()) == [wanted] * 4
    served.wait_for("both engines are back", lambda: served.ready_engines() == 2)
    served.wait_for("no call is left", lambda: all(each["held"] == 0 for each in served.facts()))


def test_an_update_replaces_all_replicas_and_no_request_fails(served: Served) -> None:
    before = {each["replica_pid"] for each in served.facts()}
    stopped = False

    async def scene() -> None:
        nonlocal stopped
        asking = [asyncio.ensure_future(served.ask_until(lambda: stopped, 8)) for _ in range(3)]
        await asyncio.to_thread(served.deploy, False, **{"max-num-seqs": 12, "shutdown-timeout": 61})

        def replaced() -> bool:
            now = {each["replica_pid"] for each in served.facts()}
            return len(now) == 2 and not now & before

        await asyncio.to_thread(served.wait_for, "all are replaced", replaced)
        stopped = True
        assert all(count > 0 for count in await asyncio.gather(*asking))

    asyncio.run(scene())


def test_a_serve_config_can_be_deployed_and_scales_by_ongoing_requests(cluster: Any) -> None:
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    with contextlib.suppress(Exception):
        serve.shutdown()
    config = yaml.safe_load((ROOT / "deploy" / "ray" / "demo.yaml").read_text("utf-8"))
    (application,) = config["applications"]
    del application["args"]["data-parallel-size"]
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 3, "upscale_delay_s": 1,
               "downscale_delay_s": 3, "metrics_interval_s": 0.5, "look_back_period_s": 2}  # fmt: skip
    application["deployments"] = [{"name": "Engine", "autoscaling_config": scaling}]
    port = config["http_options"]["port"] = free_port()
    schema = ServeDeploySchema.model_validate(config)
    serve.start(proxy_location="EveryNode", http_options={"host": "127.0.0.1", "port": port})
    _get_global_client().deploy_apps(schema)
    made = Served(port, "")
    try:
        made.wait_for("one engine", lambda: made.ready_engines() == 1)
        stopped = False

        async def scene() -> None:
            nonlocal stopped
            asking = [asyncio.ensure_future(made.ask_until(lambda: stopped, 30)) for _ in range(8)]
            await asyncio.to_thread(made.wait_for, "a second engine", lambda: len(made.facts()) == 2)
            stopped = True
            await asyncio.gather(*asking)
            stopped = False
            # While the second engine drains and ends.
            one = asyncio.ensure_future(made.ask_until(lambda: stopped, 30))
            await asyncio.to_thread(made.wait_for, "one engine again", lambda: len(made.facts()) == 1)
            stopped = True
            assert await one > 0

        asyncio.run(scene())
    finally:
        serve.delete("chorale")


def test_chorale_serve_deploys_the_application_and_deletes_it_when_stopped(
    cluster: Any, tmp_path: Path
) -> None:
    from ray import serve

    with contextlib.suppress(Exception):
        serve.shutdown()
    port = free_port()
    command = [sys.executable, "-m", "chorale", "serve", "demo", "--device", "cpu", "-dpb", "ray",
               "-dp", "1", "--port", str(port), "--max-num-seqs", "8"]  # fmt: skip
    log = (tmp_path / "log").open("w+")
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    made = Served(port, "")
    try:
        made.wait_for("ready", lambda: made.ready_engines() == 1 or process.poll() is not None)
        assert process.poll() is None, Path(log.name).read_text()
        assert made.client.chat.completions.create(**ASKED, max_tokens=5).choices
        made.wait_for("the line", lambda: "ready at http://" in (tmp_path / "log").read_text())
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(120)
        log.close()
    said = (tmp_path / "log").read_text()
    assert code == 0, said
    assert not serve.status().applications
