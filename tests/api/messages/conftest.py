"""Lets the tests of this folder import the helpers of the one above it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
