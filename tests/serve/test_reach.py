"""Commands use the server at the default address, and wait while it loads its model."""

from __future__ import annotations

import pytest

from chorale.errors import ConfigError
from chorale.serve import private_server
from chorale.serve.private_server import reach
from tests.support.http_server import Asked, HttpServer, Reply


class Health(HttpServer):
    """A server whose /health answers with ``statuses``, one after the other."""

    def __init__(self, *statuses: int) -> None:
        super().__init__()
        self.statuses = list(statuses)

    def answer(self, asked: Asked) -> Reply:
        return Reply(self.statuses.pop(0))


def test_a_server_that_loads_its_model_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise ``chorale chat`` beside a server that starts would talk to another model."""
    with Health(503, 503, 503, 200) as server:
        monkeypatch.setattr(private_server, "DEFAULT_URL", f"{server.url}/v1")
        with reach(None, None, []) as endpoint:
            assert endpoint.base_url == f"{server.url}/v1"
    assert server.statuses == []
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_invalid_configuration_is_told_once_without_the_log() -> None:
    with pytest.raises(ConfigError) as refused, reach(None, None, ["demo", "--max-num-seqs", "0"]):
        pass
    assert "--max-num-seqs" in refused.value.message
    assert "error:" not in refused.value.message
    assert "\n" not in refused.value.message
