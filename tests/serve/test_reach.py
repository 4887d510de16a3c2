"""Commands use the server at the default address, and wait while it loads its model."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from chorale.errors import ConfigError
from chorale.serve import private_server
from chorale.serve.private_server import reach


@pytest.fixture
def statuses() -> list[int]:
    return []


@pytest.fixture
def address(statuses: list[int]) -> Iterator[str]:
    """A server whose /health answers with ``statuses``, one after the other."""

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses.pop(0))
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_a_server_that_loads_its_model_is_waited_for(
    address: str, statuses: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise ``chorale chat`` beside a server that starts would talk to another model."""
    statuses += [503, 503, 503, 200]
    monkeypatch.setattr(private_server, "DEFAULT_URL", address)
    with reach(None, None, []) as endpoint:
        assert endpoint.base_url == address
    assert statuses == []
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_invalid_configuration_is_told_once_without_the_log() -> None:
    with pytest.raises(ConfigError) as refused, reach(None, None, ["demo", "--max-num-seqs", "0"]):
        pass
    assert "--max-num-seqs" in refused.value.message
    assert "error:" not in refused.value.message
    assert "\n" not in refused.value.message
