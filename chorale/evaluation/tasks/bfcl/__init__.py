"""The Berkeley Function Calling Leaderboard, version 4: its categories that need no outside service."""

from chorale.evaluation.tasks.bfcl.task import Bfcl, bfcl, live, multi_turn, non_live

__all__ = ["Bfcl", "bfcl", "live", "multi_turn", "non_live"]
