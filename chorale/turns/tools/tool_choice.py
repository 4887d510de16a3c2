"""Functions as they are declared, and ``tool_choice`` in all its forms.

OpenAI's strings, a named tool of any kind, a list of allowed tools; in the shape of Chat or of Responses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from chorale.errors import RequestError
from chorale.grammar.constraint import Constraint
from chorale.harmony.messages import ToolDescription
from chorale.turns.options import CallForm
from chorale.turns.prompt.encode import function_tool

Mode = Literal["auto", "none", "required"]
_MODES: dict[str, Mode] = {"auto": "auto", "none": "none", "required": "required"}
# Tools that a type alone names, because there is one of each.
_SINGLE = ("local_shell", "shell", "apply_patch", "tool_search")
_NAMED = ("function", "custom")
# Hosted tools, under every name that their type ever had.
_HOSTED: dict[str, str] = {
    "web_search": "web_search",
    "web_search_2025_08_26": "web_search",
    "web_search_preview": "web_search",
    "web_search_preview_2025_03_11": "web_search",
    "code_interpreter": "code_interpreter",
}


@dataclass(frozen=True, slots=True)
class Function:
    """One tool that the client runs, as the model sees it: a function of the prompt.

    ``strict``: its arguments must satisfy its schema; ``param``: where that is; ``form``: what a call of it
    becomes, None for a plain function call; ``text``: a call is this text and no JSON.
    """

    tool: ToolDescription
    strict: bool = False
    param: str = "tools"
    form: CallForm | None = None
    text: Constraint | None = None

    @classmethod
    def read(cls, value: Mapping[str, Any], param: str) -> Function:
        """Raises ``RequestError``."""
        return cls(function_tool(value, param), value.get("strict") is True, f"{param}.parameters")

    @property
    def name(self) -> str:
        """Of the prompt; unique within a request."""
        return self.tool.name

    @property
    def kind(self) -> str:
        """``function``, ``custom``, ``shell``, ...: the type under which it was declared."""
        kind = "function_call" if self.form is None else self.form.kind
        return kind.removesuffix("_call").removesuffix("_tool")

    def is_named(self, name: str, namespace: str | None) -> bool:
        """Whether a client means this one."""
        if self.form is None:
            return namespace is None and name == self.name
        return name == self.form.name and namespace in (None, self.form.namespace)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """``names``: the only functions that may be called (names of the prompt); None: all that are declared.

    ``hosted``: the same for tools that the server runs: ``web_search``, ``code_interpreter``, ``mcp:LABEL``,
    ``mcp:LABEL:TOOL``. ``lasting``: of ``allowed_tools``, which hold for the whole turn; a tool that is named
    is demanded once.
    """

    mode: Mode = "auto"
    names: frozenset[str] | None = None
    hosted: frozenset[str] | None = None
    lasting: bool = False

    @property
    def is_open(self) -> bool:
        """Nothing is demanded, and nothing ruled out."""
        return self.mode == "auto" and self.names is None and self.hosted is None

    def satisfied(self) -> ToolChoice:
        """What holds once a tool of the server has been called."""
        if self.mode != "required":
            return self
        return replace(self, mode="auto") if self.lasting else AUTO

    def may_call(self, name: str) -> bool:
        return self.mode != "none" and (self.names is None or name in self.names)

    def may_use(self, hosted: str) -> bool:
        """``hosted``: one of the names above; a server's label covers its tools."""
        if self.mode == "none" or self.hosted is None:
            return self.mode != "none"
        return hosted in self.hosted or hosted.rpartition(":")[0] in self.hosted


AUTO = ToolChoice()


def read_tool_choice(
    value: Any, declared: Sequence[Function], param: str, hosted: Collection[str] = ()
) -> ToolChoice:
    """``hosted``: tools that the server runs for this request (a label stands for all of its tools).

    Raises ``RequestError`` for a form or a name that does not exist, or a call that nothing could take.
    """
    choice = _read(value, declared, param, hosted)
    callable_names = [function.name for function in declared if choice.may_call(function.name)]
    usable = [name for name in hosted if choice.hosted is None or any(_covers(name, choice.hosted))]
    if choice.mode == "required" and not callable_names and not usable:
        raise _invalid("a call is required, but no tool that can be called is declared in tools", param)
    return choice


def _covers(label: str, chosen: Collection[str]) -> Iterator[bool]:
    """Whether a hosted tool, or one tool of its server, is among those chosen."""
    return (name == label or name.startswith(f"{label}:") for name in chosen)


def _read(value: Any, declared: Sequence[Function], param: str, hosted: Collection[str]) -> ToolChoice:
    if value is None:
        return AUTO
    if isinstance(value, str):
        if value not in _MODES:
            raise _invalid(f"must be one of {', '.join(_MODES)}, or an object", param)
        return ToolChoice(_MODES[value])
    if value.get("type") == "allowed_tools":
        return _read_allowed(value, declared, param)
    key = _hosted_key(value, param)
    if key is None:
        return ToolChoice("required", frozenset(_names(value, declared, param)), frozenset())
    if not any(key == name or key.startswith(f"{name}:") for name in hosted):
        raise RequestError(
            f"{param}: no tool of type {str(value.get('type'))[:64]!r} can run for this request",
            param=param,
            code="unsupported_value",
        )
    return ToolChoice("required", frozenset(), frozenset({key}))


def _read_allowed(value: Mapping[str, Any], declared: Sequence[Function], param: str) -> ToolChoice:
    """Responses writes ``mode`` and ``tools`` beside the type, Chat one level down."""
    inner = value.get("allowed_tools", value)
    if not isinstance(inner, Mapping) or not isinstance(inner.get("tools"), list):
        raise _invalid("allowed_tools needs a list of tools", param)
    mode = inner.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise _invalid("the mode of allowed_tools must be 'auto' or 'required'", param)
    names: set[str] = set()
    keys: set[str] = set()
    for tool in inner["tools"]:
        if not isinstance(tool, Mapping):
            raise _invalid("allowed_tools needs a list of tools", param)
        # Hosted tools that do not run here may be listed too; they are never called.
        key = _hosted_key(tool, param, strict=False)
        if key is None:
            names.update(_names(tool, declared, param))
        else:
            keys.add(key)
    return ToolChoice(mode, frozenset(names), frozenset(keys), lasting=True)


def _hosted_key(value: Mapping[str, Any], param: str, strict: bool = True) -> str | None:
    """The name of the hosted tool that is meant, or None: one that the client runs."""
    kind = value.get("type", "function")
    if not isinstance(kind, str):
        raise _invalid("the type must be a string", param)
    if kind in _NAMED or kind in _SINGLE or kind == "namespace":
        return None
    if kind == "mcp":
        label, tool = value.get("server_label"), value.get("name")
        if not isinstance(label, str) or not isinstance(tool, str | None):
            raise _invalid("an mcp tool needs a server_label", param)
        return f"mcp:{label}" if tool is None else f"mcp:{label}:{tool}"
    if strict and kind not in _HOSTED:
        raise RequestError(
            f"{param}: {str(kind)[:64]!r} is not supported", param=param, code="unsupported_value"
        )
    return _HOSTED.get(str(kind), str(kind))


def _names(value: Mapping[str, Any], declared: Sequence[Function], param: str) -> list[str]:
    """Names (of the prompt) that a client's ``{"type", "name"}`` means. Raises ``RequestError`` for none."""
    kind = value.get("type", "function")
    if kind in _SINGLE:
        found = [function.name for function in declared if function.kind == kind]
        if not found:
            raise _invalid(f"no tool of type {kind!r} is declared in tools", param)
        return found
    name = _name(value, param)
    if kind == "namespace":
        found = [f.name for f in declared if f.form is not None and f.form.namespace == name]
    else:
        same = [f for f in declared if f.kind == kind and f.is_named(name, value.get("namespace"))]
        # A name alone means the tool outside of all namespaces, if there is one.
        found = [f.name for f in same if f.name == name] or [f.name for f in same]
    if not found:
        raise _invalid(f"no {kind} named {name[:64]!r} is declared in tools", param)
    return found


def _name(value: Mapping[str, Any], param: str) -> str:
    """``{"function": {"name"}}`` (Chat) or ``{"name"}`` (Responses, ``function_call``)."""
    inner = value.get("function") or value.get("custom") or value
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str):
        raise _invalid("needs the name of a function", param)
    return name


def _invalid(message: str, param: str) -> RequestError:
    return RequestError(f"{param}: {message}", param=param)
