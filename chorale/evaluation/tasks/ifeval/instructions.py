"""The 25 kinds of instructions of IFEval (Zhou et al. 2023), each a function of the text and its arguments.

They give the verdicts of ``lm_eval/tasks/ifeval`` in lm_eval 0.4.13, whose patterns scores depend on
(Apache-2.0, The Google Research Authors). Where those patterns take quadratic time on the texts of a looping
model, an equal form is used that does not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from chorale.evaluation.tasks.ifeval import language, words
from chorale.evaluation.tasks.ifeval.punkt import Parameters, split_sentences

Arguments = Mapping[str, Any]
Check = Callable[[str, Arguments, Parameters], bool]
CHECKS: dict[str, Check] = {}
_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def _check(name: str) -> Callable[[Check], Check]:
    """Registers the check of an instruction."""

    def register(check: Check) -> Check:
        CHECKS[name] = check
        return check

    return register


def _compare(count: int, relation: str, threshold: int) -> bool:
    return count < threshold if relation == "less than" else count >= threshold


@_check("keywords:existence")
def _existence(text: str, arguments: Arguments, _: Parameters) -> bool:
    return all(re.search(keyword, text, re.IGNORECASE) for keyword in arguments["keywords"])


@_check("keywords:frequency")
def _frequency(text: str, arguments: Arguments, _: Parameters) -> bool:
    count = len(re.findall(arguments["keyword"].strip(), text, re.IGNORECASE))
    return _compare(count, arguments["relation"], arguments["frequency"])


@_check("keywords:forbidden_words")
def _forbidden(text: str, arguments: Arguments, _: Parameters) -> bool:
    return not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in arguments["forbidden_words"])


@_check("keywords:letter_frequency")
def _letters(text: str, arguments: Arguments, _: Parameters) -> bool:
    letter: str = arguments["letter"]
    count = text.lower().count(letter.strip().lower())
    return _compare(count, arguments["let_relation"], arguments["let_frequency"])


@_check("language:response_language")
def _language(text: str, arguments: Arguments, _: Parameters) -> bool:
    return language.is_in(text, arguments["language"])


@_check("length_constraints:number_sentences")
def _sentences(text: str, arguments: Arguments, parameters: Parameters) -> bool:
    count = len(split_sentences(text, parameters))
    return _compare(count, arguments["relation"], arguments["num_sentences"])


@_check("length_constraints:number_paragraphs")
def _paragraphs(text: str, arguments: Arguments, _: Parameters) -> bool:
    parts = re.split(r"\s?\*\*\*\s?", text)
    if any(not part.strip() for part in parts[1:-1]):
        return False
    return bool(sum(1 for part in parts if part.strip()) == arguments["num_paragraphs"])


@_check("length_constraints:number_words")
def _words(text: str, arguments: Arguments, _: Parameters) -> bool:
    return _compare(words.count_words(text), arguments["relation"], arguments["num_words"])


@_check("length_constraints:nth_paragraph_first_word")
def _first_word(text: str, arguments: Arguments, _: Parameters) -> bool:
    parts = text.split("\n\n")
    count = sum(1 for part in parts if part.strip())
    place = arguments["nth_paragraph"]
    if place > count or not parts[place - 1].strip():
        return False
    word = parts[place - 1].split()[0].lstrip("'").lstrip('"')
    found = re.split(r"[.,?!'\"]", word)[0].lower()
    return bool(count == arguments["num_paragraphs"] and found == arguments["first_word"].lower())


@_check("detectable_content:number_placeholders")
def _placeholders(text: str, arguments: Arguments, _: Parameters) -> bool:
    """Counts ``\\[.*?\\]``."""
    count = 0
    for line in text.split("\n"):
        place = line.find("[")
        while place >= 0 and (end := line.find("]", place + 1)) >= 0:
            count += 1
            place = line.find("[", end + 1)
    return bool(count >= arguments["num_placeholders"])


@_check("detectable_content:postscript")
def _postscript(text: str, arguments: Arguments, _: Parameters) -> bool:
    marker = arguments["postscript_marker"].strip()
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return bool(re.search(patterns.get(marker, marker.lower()), text.lower()))


@_check("detectable_format:number_bullet_lists")
def _bullets(text: str, arguments: Arguments, _: Parameters) -> bool:
    stars = re.findall(r"^[^\S\n]*\*[^\*].*$", text, re.MULTILINE)
    dashes = re.findall(r"^[^\S\n]*-.*$", text, re.MULTILINE)
    return bool(len(stars) + len(dashes) == arguments["num_bullets"])


@_check("detectable_format:constrained_response")
def _constrained(text: str, arguments: Arguments, _: Parameters) -> bool:
    return any(option in text for option in _OPTIONS)


@_check("detectable_format:number_highlighted_sections")
def _highlights(text: str, arguments: Arguments, _: Parameters) -> bool:
    single = [found for found in re.findall(r"\*[^\n\*]*\*", text) if found.strip("*").strip()]
    double = [found for found in re.findall(r"\*\*[^\n\*]*\*\*", text) if found[2:-2].strip()]
    return bool(len(single) + len(double) >= arguments["num_highlights"])


@_check("detectable_format:multiple_sections")
def _sections(text: str, arguments: Arguments, _: Parameters) -> bool:
    parts = re.split(rf"\s?{arguments['section_spliter'].strip()}\s?\d+\s?", text)
    return bool(len(parts) - 1 >= arguments["num_sections"])


@_check("detectable_format:json_format")
def _json(text: str, arguments: Arguments, _: Parameters) -> bool:
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


@_check("detectable_format:title")
def _title(text: str, arguments: Arguments, _: Parameters) -> bool:
    """Looks for ``<<[^\\n]+>>`` with more in it than brackets and white space."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if start >= 0 and end > start + 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


@_check("combination:two_responses")
def _two(text: str, arguments: Arguments, _: Parameters) -> bool:
    parts = [part.strip() for part in text.split("******")]
    given = [part for part in parts if part]
    return all(parts[1:-1]) and len(given) == 2 and given[0] != given[1]


@_check("combination:repeat_prompt")
def _repeat(text: str, arguments: Arguments, _: Parameters) -> bool:
    return bool(text.strip().lower().startswith(arguments["prompt_to_repeat"].strip().lower()))


@_check("startend:end_checker")
def _end(text: str, arguments: Arguments, _: Parameters) -> bool:
    return bool(text.strip().strip('"').lower().endswith(arguments["end_phrase"].strip().lower()))


@_check("startend:quotation")
def _quotation(text: str, arguments: Arguments, _: Parameters) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == '"' == text[-1]


@_check("change_case:capital_word_frequency")
def _capital_words(text: str, arguments: Arguments, parameters: Parameters) -> bool:
    count = sum(1 for token in words.tokens(text, parameters) if token.isupper())
    return _compare(count, arguments["capital_relation"], arguments["capital_frequency"])


@_check("change_case:english_capital")
def _capital(text: str, arguments: Arguments, _: Parameters) -> bool:
    return text.isupper() and language.is_in(text, "en")


@_check("change_case:english_lowercase")
def _lowercase(text: str, arguments: Arguments, _: Parameters) -> bool:
    return text.islower() and language.is_in(text, "en")


@_check("punctuation:no_comma")
def _no_comma(text: str, arguments: Arguments, _: Parameters) -> bool:
    return "," not in text


def strict(name: str, arguments: Arguments, text: str, parameters: Parameters) -> bool:
    """Returns whether the text follows the instruction. An empty text follows none."""
    return bool(text.strip()) and CHECKS[name](text, arguments, parameters)


def loose(name: str, arguments: Arguments, text: str, parameters: Parameters) -> bool:
    """Returns whether the text follows it without asterisks, its first line or its last line, or as it is."""
    lines = text.split("\n")
    cut = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    variants = [*cut, *(part.replace("*", "") for part in cut)]
    return any(strict(name, arguments, variant, parameters) for variant in variants)
