"""``chorale run-batch`` with the fake engine. Arguments: JSON of its behaviour, then options."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from chorale.cli.main import main
from chorale.serve import supervisor
from chorale.serve.watch import WatchLimits
from tests.support.serve.fake_engine import Behaviour
from tests.support.serve.harness import FAKE_ENGINE

GIVEN = json.loads(sys.argv[1])
RUN = supervisor.run


def run(_: Any, server: Any, observer: Any, **given: Any) -> int:
    engine = msgspec.convert(GIVEN.get("behaviour", {}), Behaviour).encode()
    limits = msgspec.convert(GIVEN.get("limits", {}), WatchLimits)
    return RUN(engine, server, observer, **given, limits=limits, engine_command=FAKE_ENGINE)


if __name__ == "__main__":
    supervisor.run = run
    sys.exit(main(["run-batch", *sys.argv[2:]]))
