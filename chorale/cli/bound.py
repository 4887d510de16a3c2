"""``python -m chorale.cli.bound PID COMMAND ...``: a command that ends with the process that started it.

``chorale chat``, ``complete`` and ``bench startup`` start their private servers in this way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from chorale.processes import die_with_parent


def command(arguments: Sequence[str]) -> list[str]:
    """The command line that runs ``chorale ARGUMENTS`` as a child of this process."""
    return [sys.executable, "-m", "chorale.cli.bound", str(os.getpid()), *arguments]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    from chorale.cli.main import main  # afterwards: importing takes a while

    sys.exit(main(sys.argv[2:]))
