"""The address, key and model of the server that the examples use."""

from __future__ import annotations

import json
import os
import urllib.request

URL = os.environ.get("CHORALE_URL", "http://localhost:8000")
KEY = os.environ.get("CHORALE_API_KEY", "unused")


def model_name() -> str:
    """Returns the name in ``CHORALE_MODEL``, or else that of the server's first model."""
    if name := os.environ.get("CHORALE_MODEL"):
        return name
    request = urllib.request.Request(f"{URL}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(json.load(answer)["data"][0]["id"])
