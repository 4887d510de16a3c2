"""Texts of our own making, such as models write, in forms that graders may read differently."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

Case = dict[str, Any]
_REASONS = (
    "The gas expands, so its temperature falls.",
    "We add both masses: 3 + 4 = 7.",
    "Option B is tempting, but A) ignores friction.",
    "Dr. J. R. Smith showed in 1998 that this holds.",
    "First, (C) is impossible.",
    "*Note*: **D** has the wrong unit.",
    "Let us check each choice: (A) no, (B) maybe.",
    "Hence x = 12.5, or about $1,250.00 per year.",
    "",
)
_DECLARED = (
    *(
        "Answer: {}",
        "**Answer:** {}",
        "**Answer: {}**",
        "*Answer* – {}",
        "Answer - ({})",
        "answer is {}",
        "ANSWERS: {}",
    ),
    *(
        "The answer is ({}).",
        "Final answer: **{}**",
        "\\boxed{{{}}}",
        "\\boxed{{\\text{{{} }} 2.08}}",
        "({})",
        "[{}]",
    ),
    *(
        "\\[\\boxed{{\\textbf{{({})}}}}\\]",
        "Option {}",
        "Choice: {}",
        "**{}) the second one**",
        "__{}__",
        "*{}*",
        "{}",
    ),
    *(
        "{}.",
        "{}) because of that",
        "**{}**",
        "The best answer is {}.",
        "the best answer is {}",
        "Best answer is {}",
    ),
    *(
        "The answer is {}",
        "the answer is ({})",
        "So the answer is: {}",
        "Answer\n\n{}",
        "Answer:\n({})",
        "{}, I think",
    ),
    *(
        "I pick {} over the others",
        "\\textbf{{{}}}",
        "Thus {} it is",
        "$\\boxed{{\\mathrm{{{}}}}}$",
        "Question: {}?",
    ),
)
_NUMBERED = (
    *(
        "\\boxed{{{}}}",
        "$\\boxed{{ {} }}$",
        "\\framebox{{{}}}",
        "\\boxed{{x={}}}",
        "\\boxed{{1, {}}}",
        "\\boxed{{}} {}",
    ),
    *(
        "#### {}",
        "####{}",
        "#### ${}",
        "#### {}.",
        "#### {} dollars",
        "#### 12\n#### {}",
        "The answer is {}.",
        "**{}**",
    ),
    *(
        "{}",
        "= {}",
        "{} km",
        "\\boxed{{{}^\\circ}}",
        "\\boxed{{\\frac{{{}}}{{2}}}}",
        "x = -{}",
        "{}%",
        "so {}, or 7 more",
    ),
    *(
        "\\boxed{{{}",
        "boxed{{{}}} was asked",
        "#### -{}",
        "about {}.50",
        "</s>{}",
        "#### {}\u202e99",
        "{}th of May",
    ),
)
_WORDS = (
    *("river", "stone", "lamp", "garden", "NASA", "window", "paper", "U.S.", "Bread", "quiet"),
    *("HELLO", "tree", "cloud", "bridge", "I", "ship", "dog-eared"),
)
_SENTENCES = (
    "Dr. Smith met Mrs. Jones at 5 p.m. on Jan. 3.",
    "The U.S. economy grew. It grew by 3.5 percent in Q. 3.",
    "He works at Acme Inc. The firm is old.",
    "J. K. Rowling wrote it! Did she? Yes...",
    "Wait... what? No!!! Stop. Now.",
    "See e.g. the list, i.e. the long one, etc. and so on.",
    "“It rains.” She closed the door. ‘Well.’ he said.",
    '"I can\'t," he said. "You CAN\'T be serious."',
    "Visit www.example.com/a.html. Version 2.0. is out (really.) Good.",
    "The population was 1.5 million vs. 2 million in Sept. 1990. Wow",
    "NASA and the FBI don't agree. THE END IS NEAR; gonna run, cannot stay.",
    "He arrived at 10 a.m. Monday. He left at 11 a.m. the next day.",
    "Prof. A. Einstein lived in St. Louis, Mo. for No. 7 years.",
    "Use a comma, a semicolon; and a dash -- or an em—dash.",
    "It cost $3.88 (roughly 3,36 euros). Please buy me\ntwo of them.",
    "Chapter 3. The river bends. Figure 4. shows it. 5. Then stop.",
    "It's 'tis the season, y'all'd know (I'VE seen) [A] {B} <C>.",
    "My answer is yes. My answer is no.",
    "the quick brown fox jumps over the lazy dog.",
    "THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG.",
    "Der Fluss fließt langsam durch das Tal. Das ist gut.",
    "今日は雨です。明日は晴れます。",
    "नदी धीरे बहती है। पेड़ हरे हैं।",
    "Gen. Lee rode to Va. and Ga. in Oct. The war ended.",
)
_PARTS: tuple[Callable[[random.Random], str], ...] = (
    lambda draw: " ".join(draw.choices(_SENTENCES, k=draw.randint(1, 4))),
    lambda draw: " ".join(draw.choices(_WORDS, k=draw.randint(1, 25))) + ".",
    lambda draw: "\n".join(
        draw.choice(("* ", "- ", "  * ", " -", "*", "+ ")) + draw.choice(_WORDS) for _ in "abcd"
    ),
    lambda draw: f"{draw.choice(('<<', '<', '<<<'))}{draw.choice(('A Title', ' ', 'x>>y', ''))}>>",
    lambda draw: draw.choice(("***", "******", "\n***\n", "* * *", "\n\n", "\n\n\n", "***\n***")),
    lambda draw: (
        f"{draw.choice(('Section', 'SECTION', 'section'))} {draw.choice(('1', '2', 'X', '12'))}\nText."
    ),
    lambda draw: draw.choice(("*one*", "**two**", "*a b* and *c*", "** **", "***x***", "*open", "**a*")),
    lambda draw: draw.choice(("[name]", "[a [b] c]", "[open", "[] []", "[two\nlines]", "[x](http://y.z)")),
    lambda draw: draw.choice(
        ("P.S. Call me.", "P. P. S. More", "p.p.s", "PS. no", "P.P.S. yes", "p. s. maybe")
    ),
    lambda draw: draw.choice(
        ('{"a": [1, 2]}', '```json\n{"a": 1}\n```', "```\n[1,\n```", "nan", '"quoted"', "{}")
    ),
    lambda draw: f'"{draw.choice(_SENTENCES)}"',
    lambda draw: draw.choice(
        ("Flour is white.", "'Flour, yes", '"flour" first', "FLOUR.", "flours", "River runs")
    ),
    lambda draw: draw.choice(
        ("Name a river.", "name A RIVER. The Rhine", " Name a river.\nElbe", "Any other questions?")
    ),
)
_RELATION = ("less than", "at least")
# Each argument's value is drawn from its tuple or range.
_INSTRUCTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("keywords:existence", {"keywords": (["river", "tree"], ["HELLO"], ["lee", "is"])}),
    (
        "keywords:frequency",
        {"relation": _RELATION, "keyword": ("he", " river ", "the"), "frequency": range(1, 7)},
    ),
    ("keywords:forbidden_words", {"forbidden_words": (["river", "lamp"], ["he"], ["it", "dog"])}),
    (
        "keywords:letter_frequency",
        {"let_relation": _RELATION, "letter": tuple("aEtzq"), "let_frequency": range(1, 21)},
    ),
    ("length_constraints:number_sentences", {"relation": _RELATION, "num_sentences": range(1, 13)}),
    ("length_constraints:number_paragraphs", {"num_paragraphs": range(1, 5)}),
    ("length_constraints:number_words", {"relation": _RELATION, "num_words": range(1, 61)}),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": (2, 2, 3, 4), "nth_paragraph": (1, 2), "first_word": ("flour", "River", "the")},
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": range(1, 4)}),
    ("detectable_content:postscript", {"postscript_marker": ("P.S.", "P.P.S", "P.P.S.")}),
    ("detectable_format:number_bullet_lists", {"num_bullets": range(1, 6)}),
    ("detectable_format:constrained_response", {}),
    ("detectable_format:number_highlighted_sections", {"num_highlights": range(1, 5)}),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": ("Section", "SECTION"), "num_sections": (1, 2)},
    ),
    ("detectable_format:json_format", {}),
    ("detectable_format:title", {}),
    ("combination:two_responses", {}),
    ("combination:repeat_prompt", {"prompt_to_repeat": ("Name a river. ",)}),
    ("startend:end_checker", {"end_phrase": ("Any other questions?", "stop.", "lazy dog.")}),
    ("startend:quotation", {}),
    (
        "change_case:capital_word_frequency",
        {"capital_relation": _RELATION, "capital_frequency": range(1, 9)},
    ),
    ("punctuation:no_comma", {}),
)
_BY_LANGUAGE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("language:response_language", {"language": ("de", "en", "hi", "ja")}),
    ("change_case:english_capital", {}),
    ("change_case:english_lowercase", {}),
)


def cases(seed: int = 19) -> Iterator[Case]:
    """Yields 1,054 texts: 150 for each of five ways to read an answer, 304 with instructions."""
    draw = random.Random(seed)
    for _ in range(150):
        yield {"kind": "abcd", "text": _declared(draw, "ABCDabE")}
        yield {"kind": "aime25", "text": _numbered(draw), "target": draw.choice((12, 204, 7))}
        solution = f"So it is.\n#### {draw.choice(('12', '1,204', '7'))}"
        yield {"kind": "gsm8k", "text": _numbered(draw), "target": solution}
        yield {"kind": "mmlu", "text": _declared(draw, "ABCD"), "target": draw.choice("ABCD")}
        text = _declared(draw, "ABCDEFGHIJKab")
        yield {"kind": "mmlu_pro", "text": text, "target": draw.choice("ABCDEFGHIJ")}
    for place in range(300):
        kinds = draw.sample(_INSTRUCTIONS, 8) + draw.sample(_BY_LANGUAGE, 1) * (place % 5 == 0)
        text = _free(draw, place)
        if kinds[-1] in _BY_LANGUAGE[1:]:
            text = text.upper() if kinds[-1] is _BY_LANGUAGE[1] else text.lower()
        yield {"kind": "ifeval", "text": text, "instructions": [_filled(draw, *kind) for kind in kinds]}
    name = "length_constraints:nth_paragraph_first_word"
    for text in (
        "It rains.\n\n'Flour, yes.",
        'It rains.\n\n"FLOUR" is',
        "\n\nIt rains.\n\nFlour",
        "A\n\nFlour’s",
    ):
        arguments = {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "flour"}
        yield {"kind": "ifeval", "text": text, "instructions": [(name, arguments)]}


def _filled(draw: random.Random, name: str, values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return name, {key: draw.choice(choices) for key, choices in values.items()}


def _declared(draw: random.Random, letters: str) -> str:
    parts = [draw.choice(_REASONS) for _ in range(draw.randint(0, 2))]
    parts += [
        draw.choice(_DECLARED).format(draw.choice(letters)) for _ in range(draw.choice((0, 1, 1, 1, 2)))
    ]
    parts += [draw.choice(_REASONS)] * draw.choice((0, 0, 1))
    return draw.choice(("\n", "\n\n", " ")).join(parts)


def _numbered(draw: random.Random) -> str:
    numbers = ("12", "204", "7", "1,204", "012", "12.0", "-12", "1204", "1 204", "٧")
    parts = [draw.choice(_REASONS) for _ in range(draw.randint(0, 2))]
    parts += [draw.choice(_NUMBERED).format(draw.choice(numbers)) for _ in range(draw.choice((0, 1, 1, 2)))]
    return draw.choice(("\n", " ")).join(parts)


def _free(draw: random.Random, place: int) -> str:
    if place < len(_SENTENCES):
        return _SENTENCES[place]
    if place % 12 == 0:
        return draw.choice(("", " \n ", "...", "12345", json.dumps(_SENTENCES[:3])))
    if place % 12 == 1:
        firsts = draw.choices(
            ("It rains.", "'Flour, yes.", "The end.", "River!", 'Flour" it is', ""), k=draw.randint(2, 4)
        )
        return "\n\n".join(firsts)
    parts = [draw.choice(_PARTS)(draw) for _ in range(draw.randint(1, 6))]
    text = draw.choice(("\n", "\n\n", " ", "\n***\n")).join(parts)
    return draw.choice((text, text, text, text.upper(), text.lower(), f'"{text}"', f"\n{text}\n"))
