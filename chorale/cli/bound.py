"""``python -m chorale.cli.bound PID COMMAND ...``: runs a command that ends when its parent process ends.

``chorale chat``, ``complete`` and ``bench startup`` start their private servers this way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from chorale.machine.processes import die_with_parent


def command(arguments: Sequence[str]) -> list[str]:
    """Returns the command line that runs ``chorale ARGUMENTS`` as a child of this process."""
    return [sys.executable, "-m", "chorale.cli.bound", str(os.getpid()), *arguments]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    from chorale.cli.main import main  # after the check above, since importing takes a while

    sys.exit(main(sys.argv[2:]))
