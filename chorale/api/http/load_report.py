"""The ORCA load report: a header of the answer that tells a gateway how busy the server is.

A request asks for it with ``endpoint-load-metrics-format: TEXT`` or ``JSON``. Names and values are those of
vLLM's metrics on /metrics.
"""

from __future__ import annotations

import json

from starlette.types import Scope

from chorale.api.http.auth import HANDLER, OPEN_PATHS
from chorale.client.base import EngineClient

_ASKED = b"endpoint-load-metrics-format"
_HEADER = b"endpoint-load-metrics"


def load_report(scope: Scope, status: int, client: EngineClient) -> list[tuple[bytes, bytes]]:
    """Returns the header, or nothing if it was not asked for or the answer is an error.

    Paths that need no key have no report.
    """
    wanted = next((value.strip().upper() for name, value in scope["headers"] if name == _ASKED), b"")
    if wanted not in (b"TEXT", b"JSON") or status >= 300 or scope.get(HANDLER) in OPEN_PATHS:
        return []
    stats = client.stats
    named = {
        "kv_cache_usage_perc": stats.kv_blocks_used / max(stats.kv_blocks_total, 1),
        "num_requests_waiting": float(stats.num_waiting),
    }
    if wanted == b"JSON":
        text = json.dumps({"named_metrics": named})
    else:
        text = ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
    return [(_HEADER, wanted + b" " + text.encode())]
