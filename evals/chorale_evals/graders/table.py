"""The graders of ``file:`` tasks."""

from __future__ import annotations

from chorale_evals.graders.choice import Choice
from chorale_evals.graders.exact import Exact
from chorale_evals.graders.number import Number
from chorale_evals.graders.regex import Regex
from chorale_evals.graders.schema import JsonSchema

AnyGrader = Exact | Number | Choice | Regex | JsonSchema
