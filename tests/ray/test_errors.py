"""Errors if Ray, a cluster or GPUs are missing (needs no Ray)."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from chorale.cli.commands.serve import serve as command
from chorale.config.options.settings import merge
from chorale.errors import ConfigError, install_hint
from chorale.serve.fleet import version
from chorale.serve.fleet.command import check_room


def node(address: str, **resources: float) -> dict[str, Any]:
    return {"NodeManagerAddress": address, "Alive": True, "Resources": resources}


def test_old_versions_are_refused_and_untested_ones_give_a_warning() -> None:
    with pytest.raises(ConfigError) as caught:
        version.check(None)
    assert install_hint("ray") in caught.value.message
    with pytest.raises(ConfigError, match=r"Ray 2\.9\.3 is too old: 2\.60 or newer"):
        version.check("2.9.3")
    assert version.check("2.60.0") is None
    assert "has not been tried" in (version.check("2.61.1") or "")
    assert "has not been tried" in (version.check("3.0.0rc1") or "")


def test_serving_on_ray_without_ray_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "installed", lambda: None)
    with pytest.raises(ConfigError, match="Ray is not installed"):
        command.run(["demo", "-dpb", "ray"])


def test_an_incomplete_ray_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "installed", lambda: "2.60.0")
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(ConfigError) as caught:
        version.import_serve()
    assert caught.value.code == "config_error"
    assert install_hint("ray") in caught.value.message


@pytest.mark.parametrize(
    ("resources", "count", "message"),
    [
        (
            {"CPU": 2, "GPU": 2},
            4,
            "--data-parallel-size 4: 4 engines need 8 GPUs, 2 per engine on one node; the cluster has "
            "7 (10.0.0.1 4, 10.0.0.2 3): use --data-parallel-size 3",
        ),
        (
            {"CPU": 8, "GPU": 8},
            1,
            "--data-parallel-size 1: 1 engine needs 8 GPUs, 8 per engine on one node; the cluster has "
            "7 (10.0.0.1 4, 10.0.0.2 3): use a smaller --tensor-parallel-size, or add nodes",
        ),
        (
            {"CPU": 1},
            40,
            "--data-parallel-size 40: 40 engines need 40 CPUs; the cluster has 24 (10.0.0.1 16, 10.0.0.2 8): "
            "use --data-parallel-size 24",
        ),
        ({"CPU": 1, "NPU": 1}, 1, "the cluster has 0 (10.0.0.1 0, 10.0.0.2 0)"),
    ],
)
def test_an_error_for_too_few_gpus_lists_those_of_each_node(
    resources: dict[str, float], count: int, message: str
) -> None:
    nodes = [node("10.0.0.1", CPU=16, GPU=4), node("10.0.0.2", CPU=8, GPU=3)]
    with pytest.raises(ConfigError) as caught:
        check_room(resources, count, nodes)
    assert message in str(caught.value)


def test_enough_gpus_give_no_error() -> None:
    nodes = [node("10.0.0.1", CPU=16, GPU=4), node("10.0.0.2", CPU=8, GPU=3)]
    check_room({"CPU": 2, "GPU": 2}, 3, nodes)


def test_ray_supports_several_fronts_but_no_local_data_parallel_size() -> None:
    settings = merge(["demo", "-dpb", "ray", "-dp", "3"], {})
    assert settings.notices == ()
    server = settings.server
    assert (server.data_parallel_backend, server.data_parallel_size, server.api_server_count) == ("ray", 3, 1)
    assert merge(["demo", "-dpb", "ray", "-dp", "3", "-asc", "2"], {}).server.api_server_count == 2
    with pytest.raises(ConfigError, match="Ray places the engines"):
        merge(["demo", "-dpb", "ray", "-dp", "4", "-dpl", "2"], {})
