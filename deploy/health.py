"""The image's health check. It asks the server for /health where its options put it: a port, an address, TLS.

Process 1 has the command line; the variables and the configuration file are those of the container.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from chorale.config.options.settings import merge

ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def address(words: list[str], environ: Mapping[str, str]) -> str:
    """Returns the URL of /health of the server that a command line starts."""
    server = merge(words[words.index("serve") + 1 :], environ).server
    host = ANY.get(server.host, server.host)
    scheme = "https" if server.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}/health"


def main() -> int:
    words = Path("/proc/1/cmdline").read_text("utf-8").split("\0")[:-1]
    # The certificate names the host that clients use, not this address.
    context = ssl._create_unverified_context()
    with urllib.request.urlopen(address(words, os.environ), timeout=5, context=context) as answer:
        return int(answer.status != 200)


if __name__ == "__main__":
    sys.exit(main())
