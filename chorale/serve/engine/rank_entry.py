"""The entry of a rank process: ``python -m chorale.serve.engine.rank_entry``, as ``rank_process`` says.

Only for the order: the cycle collector runs rarely before torch is imported. The imports of ``rank_process``
take 1.1 s of CPU so, and 1.4 s otherwise (x86).
"""

from __future__ import annotations

import logging
import os

from chorale.machine.processes import collect_rarely


def main() -> int:
    collect_rarely()
    from chorale.serve.engine import rank_process

    return rank_process.main()


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # libraries would wait for ranks that have ended before this one
