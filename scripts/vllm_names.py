"""Updates the list of vLLM's names from an unpacked wheel: `python scripts/vllm_names.py WHEEL_DIR`.

Nothing is installed or imported: the names are read from the syntax trees. A known name keeps its treatment
and reason, a name that the wheel no longer has gets the word `gone`, and a new name gets a line without
treatment, which `tests/deploy/test_vllm_names.py` reports until somebody writes one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from chorale.config.options.vllm_flags import NAMES, Name, line_for, read_names

Found = dict[tuple[str, str], str]  # (kind, name) -> form
METHODS = ("get", "post", "put", "patch", "delete", "head", "websocket")
METRIC = re.compile(r"vllm:[a-z][a-z0-9_]+")
# Kind of request -> its class.
REQUESTS = {
    "field chat": "ChatCompletionRequest",
    "field completions": "CompletionRequest",
    "field responses": "ResponsesRequest",
    "field messages": "AnthropicMessagesRequest",
    "field tokenize": "TokenizeChatRequest",
    "field detokenize": "DetokenizeRequest",
    "field generate": "GenerateRequest",
}
BENCHMARKS = ("serve", "throughput", "latency", "startup", "forward", "mm_processor", "sweep")
# From the package prometheus_fastapi_instrumentator.
HTTP_METRICS = (
    "http_requests", "http_request_duration_seconds", "http_request_duration_highr_seconds",
    "http_request_size_bytes", "http_response_size_bytes",
)  # fmt: skip
HEADER = """\
# Names of vLLM {version}, one a line: kind | name | form | treatment | reason
# The form of a flag: the type of its value, short names, values that request nothing (harmless=A,B), `always`
# if it cannot be turned off, `gone` if this version no longer has the name.
# The treatment: acts, not needed, no effect, refused. `python scripts/vllm_names.py WHEEL_DIR` adds names.
"""


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def trees(folder: Path, containing: str = "") -> Iterator[ast.Module]:
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text("utf-8", errors="replace")
        if containing in text:
            yield ast.parse(text)


def called(node: ast.AST) -> str:
    """Returns the last name of a call's function, or ""."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", "") or getattr(node.func, "id", "")


def text_of(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


class Classes:
    """The classes of some folders: their fields and methods, inherited ones included."""

    def __init__(self, *folders: Path) -> None:
        self.nodes: dict[str, ast.ClassDef] = {}
        for folder in folders:
            for tree in trees(folder) if folder.is_dir() else [parsed(folder)]:
                self.nodes |= {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def body(self, name: str) -> Iterator[ast.stmt]:
        node = self.nodes.get(name)
        if node is not None:
            for base in node.bases:
                yield from self.body(getattr(base, "id", ""))
            yield from node.body

    def fields(self, name: str) -> dict[str, str]:
        """Returns the annotated public fields with their types as source text."""
        return {
            each.target.id: ast.unparse(each.annotation)
            for each in self.body(name)
            if isinstance(each, ast.AnnAssign)
            and isinstance(each.target, ast.Name)
            and not each.target.id.startswith("_")
            and "ClassVar" not in ast.unparse(each.annotation)
        }

    def methods(self, name: str) -> list[str]:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return [each.name for each in self.body(name) if isinstance(each, kinds) and each.name[0] != "_"]


def form_of(annotation: str) -> str:
    """Returns the kind of a flag's value; ``optional``: the flag may stand alone."""
    words = set(re.findall(r"\w+", annotation))
    if "bool" in words:
        return "optional" if "str" in words else "bool"
    if "Literal" not in words and words & {"list", "tuple", "set", "List"}:
        return "list"
    if "dict" in words or any(word.endswith("Config") for word in words):
        return "json"
    return next((word for word in ("int", "float") if word in words and "str" not in words), "str")


def arguments(node: ast.AST, field_type: Callable[[str, str], str] = lambda _, __: "str") -> Found:
    """Returns the long options of all `add_argument` calls below a node, with forms.

    `field_type`: from the variable and the key of `**variable["key"]` to a type.
    """
    found: Found = {}
    for call in ast.walk(node):
        if called(call) != "add_argument":
            continue
        assert isinstance(call, ast.Call)
        names = [text_of(each) for each in call.args]
        keywords = {each.arg: each.value for each in call.keywords}
        form = "str"
        spread = keywords.get(None)
        if isinstance(spread, ast.Subscript):
            form = form_of(field_type(ast.unparse(spread.value), text_of(spread.slice)))
        form = declared(keywords) or form
        short = [name for name in names if name.startswith("-") and not name.startswith("--")]
        for name in names:
            if name.startswith("--"):
                found["", name[2:].replace("_", "-")] = " ".join([form, *short])
    return found


def declared(keywords: dict[str | None, ast.expr]) -> str:
    """Returns the form that the keywords of `add_argument` state themselves, or ""."""
    action = ast.unparse(keywords["action"]) if "action" in keywords else ""
    if action.strip("'") in ("store_true", "store_false") or "Boolean" in action:
        return "bool"
    if ("nargs" in keywords and ast.unparse(keywords["nargs"]) in ("'+'", "'*'")) or "append" in action:
        return "list"
    type_ = ast.unparse(keywords["type"]) if "type" in keywords else ""
    return "json" if "json.loads" in type_ else type_ if type_ in ("int", "float") else ""


def serve_flags(root: Path) -> Found:
    tree = parsed(root / "engine/arg_utils.py")
    frontend = root / "entrypoints/common/cli_args.py"
    classes = Classes(root / "config", frontend)
    owner = {
        ast.unparse(node.targets[0]): ast.unparse(node.value.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and called(node.value) == "get_kwargs"
    }
    found = arguments(tree, lambda kwargs, key: classes.fields(owner.get(kwargs, "")).get(key, "str"))
    [make] = [
        node
        for node in parsed(frontend).body
        if isinstance(node, ast.FunctionDef) and node.name == "make_arg_parser"
    ]
    found |= arguments(make)
    fields = classes.fields("FrontendArgs")
    found |= {("", name.replace("_", "-")): form_of(type_) for name, type_ in fields.items()}
    return {("flag", name): form for (_, name), form in found.items()}


def bench_flags(root: Path) -> Found:
    """Returns the options of each benchmark that are not the engine's."""
    helpers = {
        node.name: node
        for tree in trees(root / "benchmarks/datasets")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("add_")
    }
    found: Found = {}
    for name in BENCHMARKS:
        path = root / "benchmarks" / name
        if not path.exists() and not path.with_suffix(".py").exists():
            continue
        for tree in trees(path) if path.is_dir() else [parsed(path.with_suffix(".py"))]:
            given = arguments(tree)
            waiting = [called(node) for node in ast.walk(tree)]
            while waiting:  # the functions that it calls to add the options of data sets
                helper = helpers.get(waiting.pop())
                if helper is not None:
                    given |= arguments(helper)
                    waiting += [called(node) for node in ast.walk(helper) if called(node) != helper.name]
            found |= {(f"bench {name.replace('_', '-')}", each): form for (_, each), form in given.items()}
    return found


def variables(root: Path) -> Found:
    for node in parsed(root / "envs.py").body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "environment_variables":
            assert isinstance(node.value, ast.Dict)
            return {("env", text_of(key)): "" for key in node.value.keys if text_of(key)}
    return {}


def endpoints(root: Path) -> Found:
    found: Found = {}
    for tree in trees(root / "entrypoints"):
        for call in ast.walk(tree):
            path = text_of(call.args[0]) if isinstance(call, ast.Call) and call.args else ""
            if not path.startswith("/") or not isinstance(call, ast.Call):
                continue
            name = called(call)
            if name in METHODS:
                found["endpoint", f"{name.upper()} {path}"] = ""
            elif name in ("add_api_route", "api_route"):
                listed = [each.value for each in call.keywords if each.arg == "methods"]
                for method in ast.walk(listed[0]) if listed else []:
                    if text_of(method):
                        found["endpoint", f"{text_of(method)} {path}"] = ""
            elif name in ("Mount", "mount"):
                found["endpoint", f"GET {path}"] = ""
    return found


def metrics(root: Path) -> Found:
    found = dict.fromkeys(HTTP_METRICS, "")
    for tree in trees(root, "vllm:"):
        prefixes = {
            text_of(call.args[0])
            for call in ast.walk(tree)
            if isinstance(call, ast.Call) and called(call) == "startswith" and call.args
        }
        texts = {text_of(node) for node in ast.walk(tree)} - prefixes
        found |= {text: "" for text in sorted(texts) if METRIC.fullmatch(text)}
    return {("metric", name): "" for name in found}


def classes_of(root: Path) -> Found:
    classes = Classes(root / "entrypoints", root / "sampling_params.py")
    found: Found = {(kind, field): "" for kind, name in REQUESTS.items() for field in classes.fields(name)}
    found |= {("LLM", name): "" for name in classes.methods("LLM")}
    return found | {("SamplingParams", name): "" for name in classes.fields("SamplingParams")}


def names_of(wheel: Path) -> Found:
    """Returns all names of an unpacked wheel."""
    found: Found = {}
    for part in (serve_flags, bench_flags, variables, endpoints, classes_of, metrics):
        found |= part(wheel / "vllm")
    return found


def merged(known: Iterable[Name], found: Found) -> list[Name]:
    """Returns the new list: known lines in their order, then new names at the end of their kind."""
    lines = {
        (line.kind, line.name): line._replace(form=form_with(line, found.get((line.kind, line.name))))
        for line in known
    }
    families = {line.name: line for line in lines.values() if line.name.endswith("*")}
    for key, form in sorted(found.items()):
        family = line_for(key[1], families)  # of variables; a new one has the treatment of its family
        if key not in lines:
            lines[key] = Name(*key, form, "", "") if family is None else family._replace(name=key[1])
    kinds = list(dict.fromkeys([kind for kind, _ in lines]))
    return sorted(lines.values(), key=lambda line: kinds.index(line.kind))


def form_with(line: Name, found: str | None) -> str:
    """Returns a line's form: what was written by hand, and `gone` if the wheel does not have the name."""
    words = [word for word in line.form.split() if word != "gone"]
    is_there = found is not None or line.name.endswith("*")
    return " ".join(words if is_there else [*words, "gone"])


def main() -> int:
    wheel = Path(sys.argv[1])
    version = text_of(
        next(
            node.value
            for node in ast.walk(parsed(wheel / "vllm/_version.py"))
            if isinstance(node, ast.Assign)
            and any("version" in ast.unparse(each) for each in node.targets)
            and text_of(node.value)
        )
    )
    lines = merged(read_names(), names_of(wheel))
    text = HEADER.format(version=version) + "".join(" | ".join(line).rstrip() + "\n" for line in lines)
    NAMES.write_text(text, "utf-8")
    missing = [f"{line.kind} {line.name}" for line in lines if not line.treatment]
    print(f"vLLM {version}: {len(lines)} names, {len(missing)} without treatment", *missing, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
