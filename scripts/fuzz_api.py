"""Sends random requests to the whole app, in process, with a scripted engine
(tests/support/fuzz/api_fuzzer.py).

    python scripts/fuzz_api.py --requests 20000 --seed 1

Prints the statuses, and a line for each distinct fault. Exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the API.")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.support.fuzz.api_fuzzer import fuzz

    logging.disable(logging.WARNING)
    started = time.monotonic()
    fuzzer = fuzz(arguments.requests, arguments.seed)
    total, elapsed = sum(fuzzer.statuses.values()), time.monotonic() - started
    statuses = dict(sorted(fuzzer.statuses.items()))
    print(f"{total} requests in {elapsed:.0f} s, slowest {fuzzer.slowest:.2f} s, statuses {statuses}")
    for kind, request in fuzzer.faults.items():
        print(f"FAULT {kind}\n  {request}")
    return int(bool(fuzzer.faults))


if __name__ == "__main__":
    raise SystemExit(main())
