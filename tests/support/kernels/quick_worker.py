"""The process of a ``CompilePool`` without its preparation, which takes three seconds: for tests of its life.

Tests set ``pool._MODULE`` to this module's name.
"""

from __future__ import annotations

import sys

from chorale.kernels.triton.precompile import worker_main


def main(sockets: list[int]) -> None:
    worker_main.settle_keys = lambda: None
    worker_main.main(sockets)


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]])
