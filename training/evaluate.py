"""The held-out table: the demo's abilities with words, numbers and phrasings that training never saw.

``evaluate(net, plan, folder)`` runs right after training; ``python -m training.evaluate --archive FILE`` does
it for the archive that ships. Both write ``evaluation.json``, ``evaluation.md`` and ``failures.md``. With
``--splits`` and ``--temperatures`` several processes share the work; ``--merge`` makes one table of theirs.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from chorale.harmony.messages import ContentDelta, MessageEnd, MessageStart, Repair, Terminator
from chorale.harmony.parser import Parser
from chorale.harmony.render import render_message
from chorale.harmony.vocab import START
from training.corpus import FORCED, MIXTURE, Family, arithmetic, sample, structured, tools
from training.corpus.base import ASSISTANT, Dialogue
from training.corpus.words import Split, vocabulary
from training.net import DemoNet
from training.report import Tables, merge, write

MAX_NEW = 320
FIRST_SEED = 77_000_000  # seed of the first held-out case
TABLE: tuple[Family, ...] = (
    arithmetic.sums,
    arithmetic.products,
    tools.one_call,
    tools.two_calls,
    structured.json_answer,
)
# Sixtieths of ``num_cases`` (others: a third); three in ten cases of ``one_call`` have a call in the history.
_SHARE = dict.fromkeys(TABLE, 60) | {tools.one_call: 90, tools.natural_call: 60}
SPLITS: tuple[Split, ...] = ("eval", "hard")
TEMPERATURES: tuple[float, ...] = (0.0, 1.0)
EVALUATED: tuple[Family, ...] = tuple(family for family in MIXTURE if family not in FORCED)


def name_of(family: Family) -> str:
    """Returns a family's name in ``--families``; a few names occur in several files."""
    twice = [one.__name__ for one in EVALUATED].count(family.__name__) > 1
    return f"{family.__module__.rsplit('.', 1)[-1]}.{family.__name__}" if twice else family.__name__


BY_NAME: dict[str, Family] = {name_of(family): family for family in EVALUATED}
BATCH = 256  # conversations per batch
Generate = Callable[[Sequence[Sequence[int]], int, float, int], list[list[int]]]


@dataclass(slots=True)
class Said:
    """One message that the model wrote."""

    channel: str
    recipient: str | None
    text: str


@dataclass(slots=True)
class Case:
    """One held-out conversation and its state."""

    dialogue: Dialogue
    ids: list[int]
    results: list[list[int]]  # rendered tool results still to come
    said: list[Said] = field(default_factory=list)
    well_formed: bool = True
    finished: bool = False

    @property
    def calls(self) -> list[Said]:
        return [one for one in self.said if one.recipient is not None]

    @property
    def final(self) -> str | None:
        texts = [one.text for one in self.said if one.channel == "final" and one.recipient is None]
        return texts[-1] if texts else None

    @property
    def analysis_tokens(self) -> int:
        texts = [one.text for one in self.said if one.channel == "analysis" and one.recipient is None]
        return sum(len(vocabulary().encode(text)) for text in texts)


def make_case(dialogue: Dialogue) -> Case:
    has_functions = bool(dialogue.functions)
    results = [
        render_message(message, vocabulary(), has_functions=has_functions)
        for message in dialogue.target
        if message.role == "tool"
    ]
    return Case(dialogue, [*dialogue.prompt(), START, ASSISTANT], results)


def read(case: Case, made: list[int]) -> None:
    """Takes one turn of the model; continues with the tool's result if there is one for its call."""
    parser = Parser(vocabulary())
    events = [*parser.feed_all(made), *parser.finish()]
    current: Said | None = None
    last: Terminator | None = None
    for event in events:
        if isinstance(event, MessageStart):
            current = Said(event.channel, event.recipient, "")
            case.said.append(current)
        elif isinstance(event, ContentDelta) and current is not None:
            current.text += event.text
        elif isinstance(event, MessageEnd):
            last = event.terminator
        elif isinstance(event, Repair):
            case.well_formed = False
    called = current is not None and current.recipient is not None
    case.well_formed &= last is (Terminator.CALL if called else Terminator.RETURN)
    if called and case.results and case.well_formed:
        case.ids = [*case.ids, *made, *case.results.pop(0), START, ASSISTANT]
    else:
        case.finished = True


def run_cases(cases: list[Case], generate: Generate, temperature: float, batch: int) -> None:
    for turn in range(6):
        open_cases = sorted((case for case in cases if not case.finished), key=lambda case: len(case.ids))
        for start in range(0, len(open_cases), batch):
            group = open_cases[start : start + batch]
            made = generate([case.ids for case in group], MAX_NEW, temperature, turn * 1000 + start)
            for case, ids in zip(group, made, strict=True):
                read(case, ids)


# --------------------------------------------------------------------------- checks


def last_number(text: str | None) -> int | None:
    found = re.findall(r"-?\d+", (text or "").replace(",", ""))
    return int(found[-1]) if found else None


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Returns whether a value is valid under a flat schema of the corpus."""
    if not isinstance(value, dict):
        return False
    properties = schema["properties"]
    if any(name not in value for name in schema["required"]):
        return False
    return all(name in properties and _fits_one(one, properties[name]) for name, one in value.items())


def _fits_one(value: Any, schema: dict[str, Any]) -> bool:
    kinds: dict[str, tuple[type, ...]] = {
        "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    }  # fmt: skip
    if isinstance(value, bool) != (schema["type"] == "boolean"):
        return False
    return isinstance(value, kinds[schema["type"]]) and value in schema.get("enum", [value])


def scores(case: Case) -> dict[str, bool]:
    """Returns the named checks of one case, which depend on its dialogue."""
    answer = case.dialogue.answer
    found = {"harmony": case.well_formed}
    if "result" in answer:
        found["right"] = last_number(case.final) == answer["result"] and not case.calls
    if "text" in answer:
        found["right"] = case.final == answer["text"] and not case.calls
    if "json" in answer:
        value = parsed(case.final or "")
        found["valid"] = fits(value, answer["schema"])
        found["right"] = found["valid"] and value == answer["json"]
    if case.dialogue.functions and answer.get("calls"):
        names = [(call.recipient or "").removeprefix("functions.") for call in case.calls]
        found["function"] = names == [name for name, _ in answer["calls"]]
        given = [parsed(call.text) for call in case.calls]
        found["arguments"] = found["function"] and given == [values for _, values in answer["calls"]]
        if answer.get("unseen_names"):
            found["function, names unseen"] = found["function"]
            found["arguments, names unseen"] = found["arguments"]
    elif answer.get("calls") and "needed" in answer:
        wanted = [name for name, _ in answer["calls"]]
        found["function"] = [call.recipient for call in case.calls] == wanted
    # With too few or too many calls, a result may be missing, unless the client replayed it.
    if "needed" in answer and (len(case.calls) == len(answer["calls"]) or not answer["calls"]):
        final = case.final or ""
        found["result_used"] = all(needed in final for needed in answer["needed"])
    return found


def tabulate(cases: list[Case]) -> dict[str, Any]:
    """Returns family -> check -> share, and the analysis lengths by effort."""
    shares: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    lengths: dict[str, list[int]] = defaultdict(list)
    for case in cases:
        for check, passed in scores(case).items():
            shares[case.dialogue.family][check].append(passed)
            if check == "harmony":
                shares["all"][check].append(passed)
        lengths[case.dialogue.effort].append(case.analysis_tokens)
    table: dict[str, Any] = {
        family: {"cases": max(map(len, checks.values()))}
        | {f"{check} cases": len(v) for check, v in checks.items() if len(v) < len(checks["harmony"])}
        | {check: round(sum(v) / len(v), 4) for check, v in checks.items()}
        for family, checks in shares.items()
    }
    table["analysis_tokens"] = {
        effort: statistics.median(lengths[effort]) for effort in ("low", "medium", "high") if lengths[effort]
    }
    return table


def failures(cases: list[Case], per_family: int = 60) -> str:
    """Returns some wrong answers, for inspection."""
    seen: dict[str, int] = defaultdict(int)
    lines = []
    for case in cases:
        wrong = [check for check, passed in scores(case).items() if not passed]
        if not wrong or seen[case.dialogue.family] >= per_family:
            continue
        seen[case.dialogue.family] += 1
        asked = case.dialogue.history[-1].content
        said = " | ".join(f"[{one.channel} {one.recipient or ''}] {one.text}" for one in case.said)
        lines.append(
            f"- {case.dialogue.family} {wrong}: {asked!r}\n  wanted {case.dialogue.answer}\n  said {said}"
        )
    return "\n".join(lines)


def held_out_cases(
    num_cases: int,
    split: Split = "eval",
    first_seed: int = FIRST_SEED,
    families: Sequence[Family] = EVALUATED,
) -> list[Case]:
    """Returns held-out cases: ``num_cases`` per family in the table of goals, a third of others."""
    return [
        make_case(sample(first_seed + index, split, family))
        for family in families
        for index in range(-(-num_cases * _SHARE.get(family, 20) // 60))
    ]


def run_name(split: Split, temperature: float) -> str:
    """Returns the name of the table's column: "greedy", "hard, temperature 1"."""
    how = f"temperature {temperature:g}" if temperature else "greedy"
    return how if split == "eval" else f"{split}, {how}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Returns the runs: each split at each temperature."""

    num_cases: int
    splits: Sequence[Split] = SPLITS
    temperatures: Sequence[float] = TEMPERATURES
    families: Sequence[Family] = EVALUATED
    batch: int = BATCH


def evaluate(net: DemoNet, plan: Plan, folder: Path) -> Tables:
    """Prints and writes the tables; each run is on disk as soon as it is done."""
    from training.generate import Generator

    generator = Generator(net)
    tables: Tables = {}
    wrong: list[str] = []
    for split in plan.splits:
        for temperature in plan.temperatures:
            started, name = time.perf_counter(), run_name(split, temperature)
            cases = held_out_cases(plan.num_cases, split, families=plan.families)
            run_cases(cases, generator.generate, temperature, plan.batch)
            tables[name] = tabulate(cases)
            wrong.append(f"## {name}\n\n{failures(cases)}")
            write(folder, tables, "\n\n".join(wrong))
            print(f"evaluated {len(cases)} cases, {name}, {time.perf_counter() - started:.0f} s", flush=True)
    print((folder / "evaluation.md").read_text(), flush=True)
    return tables


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument("--archive", type=Path)
    work.add_argument("--merge", type=Path, nargs="+", metavar="FOLDER", help="of runs made apart")
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--splits", type=_splits, default=SPLITS, metavar="eval,hard")
    parser.add_argument("--temperatures", type=_temperatures, default=TEMPERATURES, metavar="0,1")
    parser.add_argument("--families", type=_families, default=EVALUATED, metavar="one_call,json_answer,...")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--out", type=Path, default=Path("build/evaluation"))
    return parser.parse_args(arguments)


def _splits(given: str) -> tuple[Split, ...]:
    names = given.split(",")
    if unknown := set(names) - set(SPLITS):
        raise argparse.ArgumentTypeError(f"no split {sorted(unknown)}; there are {', '.join(SPLITS)}")
    return tuple(split for split in SPLITS if split in names)


def _temperatures(given: str) -> tuple[float, ...]:
    return tuple(float(one) for one in dict.fromkeys(given.split(",")))


def _families(given: str) -> tuple[Family, ...]:
    names = given.split(",")
    if unknown := set(names) - set(BY_NAME):
        raise argparse.ArgumentTypeError(f"no family {sorted(unknown)}; there are {', '.join(BY_NAME)}")
    return tuple(BY_NAME[name] for name in dict.fromkeys(names))


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.merge:
        order = [run_name(split, temperature) for split in SPLITS for temperature in TEMPERATURES]
        merge(options.merge, options.out, order)
        print((options.out / "evaluation.md").read_text(), end="")
        return
    from training.restore import restore

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = Plan(options.cases, options.splits, options.temperatures, options.families, options.batch)
    evaluate(restore(options.archive).to(device), plan, options.out)


if __name__ == "__main__":
    main()
