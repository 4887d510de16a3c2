"""A Ray cluster whose nodes are local processes, and which does not outlive the program that uses it.

Ray's daemons do not end with their parent. If this program is killed, the reaper that also watches test runs
kills them: they have its folder in their environment.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chorale.machine.folders import Folder
from tests.support import REAPER, ROOT

MOST_PATH = 107 - len("/ray/session_2026-11-24_14-16-23_123456_1234567/sockets/plasma_store.1")
OBJECTS = 100 * 2**20  # bytes of each node's object store, which stays empty


@contextlib.contextmanager
def reaped() -> Iterator[Path]:
    """Yields a folder for temporary files; processes that have it in their environment end with this one."""
    own = os.environ.get("TMPDIR")
    # A test run has its own folder, unless the paths of Ray's sockets in it would be too long.
    if "CHORALE_TEST_RUN" in os.environ and len(tempfile.gettempdir()) <= MOST_PATH:
        yield Path(tempfile.gettempdir())
        return
    with Folder("/tmp") as folder:
        command = [sys.executable, "-I", str(REAPER), str(os.getpid()), str(folder)]
        reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, cwd="/")
        os.environ["TMPDIR"] = str(folder)
        tempfile.tempdir = None
        try:
            yield folder
        finally:
            reaper.communicate()
            os.environ.pop("TMPDIR") if own is None else os.environ.update(TMPDIR=own)
            tempfile.tempdir = None


@contextlib.contextmanager
def ray_cluster(nodes: int = 3, cpus: int = 4, log: bool = False, **resources: Any) -> Iterator[Any]:
    """Yields the running cluster, to which this process is connected."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    # Workers import the tests and chorale from here.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    with reaped() as folder:
        options = {"num_cpus": cpus, "object_store_memory": OBJECTS, "include_dashboard": False, **resources}
        cluster = Cluster(initialize_head=True, head_node_args=options | {"temp_dir": str(folder / "ray")})
        try:
            for _ in range(nodes - 1):
                cluster.add_node(num_cpus=cpus, object_store_memory=OBJECTS, **resources)
            ray.init(address=cluster.address, log_to_driver=log, logging_level="ERROR")
            yield cluster
        finally:
            with contextlib.suppress(Exception):
                serve.shutdown()
            ray.shutdown()
            cluster.shutdown()
            os.environ.pop("RAY_ADDRESS", None)
