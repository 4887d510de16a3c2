"""A local S3: moto's server, where it is installed (``pip install 'moto[server]'``)."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator

import pytest

from tests.support.ports import free_port

PROGRAM = os.environ.get("CHORALE_TEST_MOTO_SERVER") or shutil.which("moto_server")
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


@contextlib.contextmanager
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yields the address of an empty bucket, with credentials in the environment."""
    if PROGRAM is None:
        pytest.skip("needs moto_server, on the PATH or named by CHORALE_TEST_MOTO_SERVER")
    address = f"http://127.0.0.1:{(port := free_port())}"
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": address}.items():
        monkeypatch.setenv(name, value)
    process = subprocess.Popen(
        [PROGRAM, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(300):
            with contextlib.suppress(OSError):
                made = urllib.request.Request(f"{address}/bucket", method="PUT")
                urllib.request.urlopen(made, timeout=5).close()
                break
            time.sleep(0.1)
        yield "s3://bucket/some/where"
    finally:
        process.kill()
        process.wait()
