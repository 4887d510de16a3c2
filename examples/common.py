"""The server and the model that the examples talk to."""

from __future__ import annotations

import os

URL = os.environ.get("CHORALE_URL", "http://localhost:8000")
MODEL = os.environ.get("CHORALE_MODEL", "demo")  # the name of the model that the server runs
KEY = os.environ.get("CHORALE_API_KEY", "unused")
