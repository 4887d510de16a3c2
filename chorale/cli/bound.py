"""``python -m chorale.cli.bound PID COMMAND ...``: runs a command that ends when its parent process ends.

``chorale chat``, ``complete`` and ``bench startup`` start their private servers this way.
"""

from __future__ import annotations

import sys

from chorale.machine.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    from chorale.cli.main import main  # after the check above, since importing takes a while

    sys.exit(main(sys.argv[2:]))
