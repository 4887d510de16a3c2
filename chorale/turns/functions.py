"""Function: one tool that the client runs, as the model sees it, and the form of its calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from chorale.grammar.constraint import Constraint
from chorale.harmony.messages import FUNCTIONS, ToolDescription
from chorale.turns.events import ItemKind

FUNCTION_PREFIX: Final = f"{FUNCTIONS}."


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of calls to a client's tool, if not a plain function call.

    ``name`` and ``namespace``: as the client declared them; ``wrapped``: the model writes a JSON object with
    one string, ``input``, and the client receives that string.
    """

    kind: ItemKind
    name: str
    namespace: str | None = None
    wrapped: bool = False


@dataclass(frozen=True, slots=True)
class Function:
    """A function in the prompt.

    ``strict``: its arguments must satisfy its schema; ``param``: the field with the schema; ``form``: of its
    calls, None for plain function calls; ``text``: a call is this text instead of JSON.
    """

    tool: ToolDescription
    strict: bool = False
    param: str = "tools"
    form: CallForm | None = None
    text: Constraint | None = None

    @property
    def name(self) -> str:
        """Its name in the prompt, unique within a request."""
        return self.tool.name

    @property
    def kind(self) -> str:
        """The type of its declaration: ``function``, ``custom``, ``shell``, ..."""
        kind = "function_call" if self.form is None else self.form.kind
        return kind.removesuffix("_call").removesuffix("_tool")

    def is_named(self, name: str, namespace: str | None) -> bool:
        """Returns whether a client's ``name`` means this function."""
        if self.form is None:
            return namespace is None and name == self.name
        return name == self.form.name and namespace in (None, self.form.namespace)
