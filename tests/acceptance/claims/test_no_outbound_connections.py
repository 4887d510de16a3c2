"""Nothing is downloaded: the default model answers in a process that cannot reach any network.

``tests/demo/test_demo_checkpoint.py`` tests the same of its first use, which expands it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from chorale.model.demo import default_cache_dir, ensure_demo
from tests.support import ROOT

SCRIPT = """
import sys

def refuse(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        raise RuntimeError(f"{event} {arguments}")
    if event in ("socket.connect", "socket.sendto") and not isinstance(arguments[1], (str, bytes)):
        raise RuntimeError(f"{event} {arguments[1]}")  # a path is a unix socket

sys.addaudithook(refuse)
import torch
torch.set_num_threads(1)
from chorale import LLM, SamplingParams
from chorale.grammar.matcher import tokenizer
import chorale.api.app

tokenizer()
with LLM() as llm:
    answer = llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=8, temperature=0))
assert answer
print("answered")
"""


def test_no_outbound_connection_is_tried(tmp_path: Path) -> None:
    ensure_demo()
    environment = {
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(default_cache_dir().parent),
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "answered"
