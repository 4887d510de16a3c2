"""IFEval: prompts whose instructions a program verifies, graded as lm-evaluation-harness grades them."""

from chorale.evaluation.tasks.ifeval.task import ifeval

__all__ = ["ifeval"]
