"""The application, the router and the export, with Ray and without a cluster."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from chorale.client.fleet.members import Ticket
from chorale.engine.types import GenerateRequest
from chorale.errors import ConfigError
from tests.support import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")
EXAMPLES = ROOT / "deploy" / "ray"


@pytest.fixture(autouse=True, scope="module")
def needs_ray() -> None:
    pytest.importorskip("ray.serve", reason="needs the extra ray")


def deployments(args: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the deployments of the front and the engine."""
    from chorale.serve.fleet import app

    front = app(args)._bound_deployment
    return front, front.init_args[0]._bound_deployment


def test_an_engine_has_its_gpus_in_one_bundle_on_one_node() -> None:
    front, engine = deployments(
        {"model": "openai/gpt-oss-120b", "device": "cuda", "tensor-parallel-size": 2, "data-parallel-size": 3,
         "api-server-count": 2, "shutdown-timeout": 30, "max-background-responses": 100}
    )  # fmt: skip
    assert (front.name, engine.name) == ("Front", "Engine")
    assert (front.num_replicas, engine.num_replicas) == (2, 3)
    config = engine._deployment_config
    replica = engine._replica_config
    assert replica.placement_group_bundles == [{"CPU": 2.0, "GPU": 2.0}]
    assert replica.placement_group_strategy == "STRICT_PACK"
    assert (replica.ray_actor_options["num_gpus"], replica.ray_actor_options["num_cpus"]) == (2.0, 2.0)
    assert config.graceful_shutdown_timeout_s == 40
    assert config.request_router_config.request_router_class == "chorale.serve.fleet.router.PrefixRouter"
    start = front.init_args[1]
    assert (start.server.api_server_count, start.server.max_background_responses) == (1, 50)
    assert front._replica_config.ray_actor_options.get("num_gpus", 0) == 0


def test_npus_are_custom_resources_and_a_cpu_engine_has_none() -> None:
    _, engine = deployments({"model": "demo", "device": "npu", "tensor-parallel-size": 2})
    assert engine._replica_config.placement_group_bundles == [{"CPU": 2.0, "NPU": 2.0}]
    assert engine._replica_config.ray_actor_options["resources"] == {"NPU": 2.0}
    _, engine = deployments({"model": "demo"})
    assert engine._replica_config.placement_group_bundles == [{"CPU": 1.0}]


def test_the_same_options_give_the_same_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CHORALE_API_KEY", "secret-key")
    first, second = (deployments({"model": "demo", "seed": 5}) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        one_args = [each for each in one.init_args if not hasattr(each, "_bound_deployment")]
        assert one_args == [each for each in other.init_args if not hasattr(each, "_bound_deployment")]
    assert "secret-key" not in repr(first[0].init_args[1])
    assert len(first[0].init_args[1].api_key_hashes) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"model": "demo", "modle": "x"}, "args: unknown key modle"),
        ({"model": "demo", "seed": "many"}, "args: seed: "),
        ({"model": "demo", "uds": "/tmp/x"}, "--uds cannot be used with Ray"),
        ({"model": "demo", "data-parallel-size": 65}, "--data-parallel-size must be between 1 and 64"),
    ],
)
def test_an_error_names_the_wrong_argument(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deployments(args)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_ray_and_chorale_accept_the_example_files(path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    from chorale.serve.fleet import app

    config = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text("utf-8")))
    assert str(config.proxy_location.value) == "EveryNode"
    (application,) = config.applications
    assert application.import_path == "chorale.serve.fleet:app"
    front = app(application.args)._bound_deployment
    named = {front.name, front.init_args[0]._bound_deployment.name}
    assert {each.name for each in application.deployments} <= named


def test_importing_chorale_imports_no_ray() -> None:
    code = "import sys, chorale, chorale.serve.fleet, chorale.serve.fleet.version, chorale.cli.main; "
    code += "print('ray' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


# ------------------------------------------------------------------------------- router and export


class Fleet:
    def __init__(self, ranked: list[str]) -> None:
        self.ranked = ranked

    def rank(self, ticket: Ticket, names: Any) -> list[str]:
        return [name for name in self.ranked if name in names]


class Assigner:
    def __init__(self, ranked: list[str]) -> None:
        self.fleet = Fleet(ranked)
        self.announced: dict[str, Any] = {}
        self.accepted: list[tuple[str, str]] = []

    def ticket(self, name: str) -> Ticket | None:
        return Ticket(GenerateRequest(request_id=name, prompt_token_ids=[1])) if name == "asked" else None

    def replicas(self, found: dict[str, Any]) -> None:
        self.announced = found

    def routed(self, name: str, replica: str) -> None:
        self.accepted.append((name, replica))


def routes(ranked: list[str] | None, asked: str = "asked", **kwargs: Any) -> list[list[str]]:
    """Returns the router's ranking for a request. If ``ranked`` is None, the process has no fleet."""
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
    from ray.serve._private.request_router.common import PendingRequest

    from chorale.serve.fleet.assigner import ASSIGNERS
    from chorale.serve.fleet.router import PrefixRouter

    async def scene() -> list[list[str]]:
        deployment = DeploymentID("Engine", "app")
        assigner = Assigner(ranked or [])
        if ranked is not None:
            ASSIGNERS["app", "Engine"] = assigner  # type: ignore[assignment]
        try:
            router = PrefixRouter(deployment_id=deployment, handle_source=DeploymentHandleSource.REPLICA)
        finally:
            ASSIGNERS.pop(("app", "Engine"), None)
        router.initialize_state(**kwargs)
        ids = [ReplicaID(name, deployment) for name in ("a", "b", "c")]
        replicas = [SimpleNamespace(replica_id=each, replica_metadata={"engine": "x"}) for each in ids]
        router._replicas = {each.replica_id: each for each in replicas}
        router._replica_id_set = set(router._replicas)
        router._announce()
        assert set(assigner.announced) == ({"a", "b", "c"} if ranked is not None else set())
        pending = PendingRequest(args=[asked], kwargs={}, metadata=SimpleNamespace(multiplexed_model_id=""))
        router.on_request_routed(pending, ids[0], None)
        assert assigner.accepted == ([(asked, "a")] if ranked is not None else [])
        chosen = await router.choose_replicas(replicas, pending)
        assert pending.routing_context.should_backoff  # otherwise Ray would retry without a pause
        return [[each.replica_id.unique_id for each in rank] for rank in chosen]

    return asyncio.run(scene())


def test_the_router_ranks_replicas_by_cost() -> None:
    assert routes(["c", "a"]) == [["c"], ["a"]]


@pytest.mark.parametrize("unknown", ["no fleet", "no index", "another's request", "asked for"])
def test_power_of_two_choices_is_used_if_the_cost_is_unknown(unknown: str) -> None:
    found = {
        "no fleet": lambda: routes(None),
        "no index": lambda: routes([]),
        "another's request": lambda: routes(["a"], asked="other"),
        "asked for": lambda: routes(["a"], policy="power_of_two"),
    }[unknown]()
    assert len(found) == 1
    assert len(set(found[0])) == 2


def test_the_random_policy_shuffles_and_an_unknown_policy_is_an_error() -> None:
    assert sorted(routes(["a"], policy="random")) == [["a"], ["b"], ["c"]]
    with pytest.raises(ValueError, match="must be one of prefix, power_of_two, random"):
        routes(["a"], policy="best")


def test_metrics_get_rays_names_and_only_changed_values_are_set() -> None:
    from chorale.api.telemetry.metrics import Metrics
    from chorale.serve.fleet.export import RayExport

    made: dict[str, Any] = {}

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            assert description
            self.keys, self.values, self.num_set = tag_keys, {}, 0
            made[name] = self

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert set(tags) == set(self.keys)
            self.values[tuple(tags.values())] = value
            self.num_set += 1

    metrics, export = Metrics("demo"), RayExport(Gauge, leave_out=("engine",))
    export.update(metrics.collect_engines())
    export.update(metrics.collect_engines())
    assert made["vllm_num_requests_running"].values == {("demo",): 0.0}
    assert made["vllm_num_requests_running"].num_set == 1
    assert "vllm_prompt_tokens_total" in made
    requests = RayExport(Gauge)
    metrics.series.count("vllm:request_success", ("stop",))
    metrics.engines[0].histograms["vllm:time_to_first_token_seconds"].observe(0.05)
    requests.update(metrics.collect_requests())
    assert made["vllm_request_success_total"].values == {("demo", "0", "stop"): 1.0}
    buckets = made["vllm_time_to_first_token_seconds_bucket"].values
    assert buckets["demo", "0", "0.04"] == 0.0
    assert buckets["demo", "0", "0.06"] == buckets["demo", "0", "+Inf"] == 1.0
    assert not any(name.startswith("http") for name in made)
