"""Handwritten answers (text, target[, options]): right ones in odd forms, wrong ones that look right."""

from __future__ import annotations

from typing import Any

Case = tuple[Any, ...]

RIGHT_NUMBERS: list[Case] = [
    ("42", 42), (" 42\n", 42), ("42.", 42), ("42.0", 42), ("42.00", "42"), ("+42", 42), ("042", 42), ("1,234", 1234),
    ("1 234", 1234), ("1\u202f234", 1234), ("1\u00a0234", 1234), ("1,000,000", 1_000_000), (r"1{,}234", 1234),
    (r"$1\,234$", 1234), ("$5.00", 5), ("-$5", -5), ("USD 5", 5), ("5 €", 5), ("£1,000.50", 1000.5), ("5 dollars", 5),
    ("$5.00 per day", 5), ("5 km/h", 5), ("5km", 5), ("5 m^2", 5), ("5 m²", 5), ("5 cm³", 5), ("100°", 100),
    (r"90^\circ", 90), (r"90^{\circ}", 90), ("37 °C", 37), ("−5", -5), ("–5", -5), ("-5", -5),
    ("The answer is −5.", -5), ("x = -7", -7), ("x = - 7", -7), ("Answer: -5", -5), ("Answer - 5", 5), ("**42**", 42),
    ("*42*", 42), ("`42`", 42), ("$42$", 42), (r"\(42\)", 42), (r"\[42\]", 42), ("$$42$$", 42), (r"\boxed{42}", 42),
    (r"\boxed{ 42 }", 42), (r"\boxed{-42}", -42), (r"$\boxed{42}$.", 42), (r"\boxed{x = 42}", 42),
    (r"\boxed{42\text{ cm}}", 42), (r"\boxed{\$42}", 42), (r"\boxed{42\%}", 42), (r"\boxed{\text{42}}", 42),
    (r"\boxed{3/4}", 0.75), (r"\boxed{\frac{3}{4}}", "3/4"), (r"\boxed{\dfrac{3}{4}}", "3/4"),
    (r"-\frac{3}{4}", -0.75), (r"\frac{-3}{4}", -0.75), ("3/4", "0.75"), ("6/8", "3/4"), ("-3/4", "-0.75"),
    (".5", 0.5), ("0.50", 0.5), ("5.", 5), ("50%", 50), ("50 %", 50), ("50 percent", 50), ("50%", 0.5),
    ("50%", "50%"), ("0.5", "50%"), ("3e8", 3e8), ("1.5E3", 1500), ("２４", 24), ("٤٢", 42), ("#### 72", 72),
    ("#### 1,234", 1234), ("She sells 9.\n#### 18", 18), ("The answer is 18", 18),
    ("The answer is 18 because 9*2=18.", 18), ("The answer is: 18", 18), ("The answer is **18**.", 18),
    ("**Answer:** 18", 18), ("Answer: **18** clips", 18), ("**Final Answer**\n\n18", 18), ("### Answer\n\n18", 18),
    ("Answer: 18\n\nExplanation: 9 * 2 and 3 more days", 18), ("The answer is:\n\n$$18$$", 18),
    ("The final answer is $\\boxed{18}$. I hope it is correct.", 18), ("The answer is 12 (3 × 4).", 12),
    ("The answer is 3 + 4 = 7", 7), ("17 + 25 = 42", 42), ("So she makes 9 * 2 = $18 every day.", 18),
    ("5 − 8 = −3", -3), ("x ≈ 3.14", 3.14), (r"x \approx 3.14", 3.14), ("The answer is 5. Wait, the answer is 6.", 6),
    ("The answer is not 5, it is 6.", 6), ("The answer is 6, not 5.", 6), ("Not 5 but 6", 6),
    ("It was 5 at first.\nNow it is 6.", 6), ("Total: 5 apples", 5), ("~5", 5), ("≈5", 5), ("≈ 5", 5), ("about 5", 5),
    ("approximately 5 apples", 5), ("(5)", 5), ("[5]", 5), ("{5}", 5), ('"5"', 5), ("= 5", 5), ("5!", 5), ("5th", 5),
    ("The answer is 5 hours and 30 minutes early", 5), ("Solution: 5", 5), ("A: 5", 5), ("5\n\n", 5),
    ("Step 1: 3 boxes.\nStep 2: 4 more.\nSo 7 in total.", 7),
    ("**Step 1:** 3 and 4\n\nThe total is **7** in 2 steps.", 7), ("The answer is 10, since 10/2 = 5", 10),
    ("My final answer is 5, since 2+3=5", 5), ("10/2 = 5, so she has 10 left", 10), ("The total is 12 (3 × 4).", 12),
    ("It costs $1,234.56 (including 8% tax).", 1234.56), ("f(3) = 5", 5), ("x=5", 5), ("The answer is x = 5", 5),
    ("3 * 4 = 12 apples", 12), ("It is 5 (five).", 5), ("-> 5", 5), ("=> 5", 5), ("→ 5", 5), ("10 minus 5 is 5", 5),
    ("No. 5", 5), ("5️⃣", 5), ("1.0e+3", 1000), ("Answer = 5", 5), ("72.00001", 72, {"tolerance": 0.001}),
    ("99", 100, {"relative": 0.01}), ("3.14", 3.14159, {"relative": 0.001}),
]  # fmt: skip

WRONG_NUMBERS: list[Case] = [
    ("", 5), (" ", 0), ("no", 0), ("nothing", 0), ("I cannot answer.", 5), ("43", 42), ("4.2", 42), ("420", 42),
    ("142", 42), ("-5", 5), ("5", -5), ("−5", 5), ("not 5", 5), ("The answer is not 5.", 5), ("It isn't 5", 5),
    ("5 or 6", 5), ("The answer is 5 or 6", 5), ("5, maybe 6", 5), ("5-7", 5), ("The answer is 5-7", 5),
    ("The answer is between 5 and 7.", 5), ("5 ± 1", 5), ("5π", 5), ("5 π", 5), (r"5\pi", 5), ("5√2", 5), ("√5", 5),
    (r"5\sqrt{2}", 5), ("5i", 5), ("5x", 5), ("5/6", 5), ("5/6", 6), (r"\frac{5}{3}", 5), (r"\frac{5}{3}", 3),
    ("3 2/5", 5), ("2 1/2", 2), ("5:30", 5), ("H2O", 2), ("m^2", 2), ("v2", 2), ("x_5", 5), ("log_5", 5),
    ("more than 5", 5), ("less than 5", 5), ("at least 5", 5), ("over 5", 5), ("at most 5", 5), ("5.001", 5),
    ("4.999", 5), ("51", 5), ("55", 5), ("0.5%", 0.5), ("5%", "50%"), ("0.05", "50%"), ("5 million", 5),
    ("5 thousand", 5), ("5k", 5), ("5e3", 5), ("5^2", 5), ("5^2", 2), ("5 × 10^2", 5), ("5³", 5), ("1.2.3", 3),
    ("negative five", 5), ("three quarters", 3), ("two thirds", 2), ("two dozen", 2), ("5 dozen", 5),
    ("5 squared", 5), ("five and a half", 5), ("5₁₀", 510), ("101₂", 1012), ("CO₂", 2), ("5 hundred", 5),
    ("twelve percent", 12), ("one point five", 1), ("5 + 3", 5), ("The answer is 10, since 10/2 = 5", 5),
    ("x = 5 or x = 6", 5), ("5 × 10", 5), ("10 - 5", 5), ("-0.5", 0.5), ("(3, 5)", 3), ("1,234", 1.234),
    ("1,234", 234), ("1 234", 234), ("1,234", 1), (r"\boxed{6} not 5", 5), (r"5, so \boxed{6}", 5),
    (r"\boxed{5, 6}", 5), (r"\boxed{5", 6), ("five or six", 5), ("not five", 5), ("twenty-five", 5),
    ("twenty-five", 20), ("five hundred", 5), ("no one", 1), ("The answer is 6, not 5", 5),
    ("The answer is 5. Wait, the answer is 6.", 5), ("5 is not the answer; the answer is 6", 5),
    ("I considered 5 but the result is 6.", 5), ("5,000", 5), ("1/0", 1), ("infinity", 0), ("NaN", 0), ("1e5", 15),
    ("Answer:", 5), ("#### ", 0), ("3.14", 3.14159), ("0.333", "1/3"), ("33%", "1/3"),
    ("98", 100, {"relative": 0.01}), ("72.1", 72, {"tolerance": 0.05}), ("five point five", 5), ("5 squared", 25),
    ("a dozen", 1), ("2+2=5", 4), ("١٢", 21),
]  # fmt: skip

CHOICES = {"choices": ["London", "Rome", "Paris", "Oslo"]}
RIGHT_CHOICES = [
    "C", "c", " C ", "C.", "C)", "(C)", "(c)", "[C]", "{C}", '"C"', "`C`", "**C**", "*C*", "**(C)**", "**C.**",
    "C) Paris", "C. Paris", "C: Paris", "C - Paris", "(C) Paris", "**C) Paris**", "**C. Paris**", "C, Paris",
    "Answer: C", "answer: c", "Answer: (C)", "Answer: **C**", "**Answer: C**", "**Answer:** C", "ANSWER: C",
    "Answer - C", "Answer:\nC", "### Answer\n\nC", "Final answer: C", "Final Answer: \\boxed{C}", "\\boxed{C}",
    "\\boxed{\\text{C}}", "\\boxed{(C)}", "$\\boxed{\\textbf{(C)}}$", "\\boxed{C}.", "The answer is C",
    "The answer is (C).", "The answer is: C", "The answer is **C**.", "The answer is option C.",
    "So the answer is C, Paris.", "The answer would be C.", "Answer is C",
    "The answer is C because A and B are wrong.", "The correct answer is C", "The correct answer is (C) Paris.",
    "The best choice is C.", "I choose C.", "I would go with C.", "I'd pick option C.", "Option C", "Choice C",
    "Option C is correct.", "(C) is the correct answer.", "C is correct.", "C is the best answer.",
    "C is the right answer, since Paris is the capital.", "Let me think.\n\nA is wrong. B is wrong.\n\nC",
    "C\n\nExplanation: it is the capital of France.", "London is in England, so it is not A.\n\n**C**",
    "A and B are cities too.\n\nThe answer is C.", "First I thought the answer is A. No: the answer is C.", "It's C.",
    "It is C", "I think it's C.", "Definitely C", "Therefore, C.", "So **C**.", "My guess: it must be (C)", "Paris",
    "paris", "Paris.", "**Paris**", "Answer: Paris", "The answer is Paris.", "\\boxed{Paris}",
]  # fmt: skip
WRONG_CHOICES = [
    "", " ", "D", "A", "E", "CC", "C++", "C#", "Can't say", "Certainly", "Chlorine", "Celsius", "Canada",
    "C'est la vie", "Not C", "not C.", "C is wrong", "C is not correct", "C isn't right", "Option C is incorrect.",
    "I can't choose C", "The answer is not C", "The answer is not (C).", "The answer is D, not C",
    "The answer is B, not C.", "C or D", "C/D", "C, D", "C & D", "C and D", "A and C", "Both C and D",
    "Either A or C", "neither C nor D", "C, maybe D", "The answer is C or D", "The answer is C and D",
    "\\boxed{C, D}", "\\boxed{D} rather than C", "The answer is C) London", "C) London", "C. Oslo",
    "The answer is Canada", "Answer: Cannot be determined", "Answer: D", "Choose carefully",
    "A good answer would be C or D", "Vitamin C helps", "B\n\nC is wrong",
    "(A) London\n(B) Rome\n(C) Paris\n(D) Oslo", "A) London\nC) Paris", "London", "Rome.", "Not Paris",
    "Paris or Rome", "The answer is Rome, not Paris.", "The answer is C. No, the answer is D.", "It is not C",
    "It's D, not C", "It's C or D", "So C is out", "He got a C", "C (or D)", "I think D", "Answer:", "C C C D",
    "Option C is tempting, but option D is correct.",
]  # fmt: skip

# (text, target) for letters that are also words
RIGHT_ARTICLES = [
    ("A", "A"), ("a", "A"), ("(a)", "A"), ("The answer is A.", "A"), ("The answer is a", "A"),
    ("A because it is cold.", "A"), ("The answer is A since it is cold.", "A"), ("I", "I"), ("(I)", "I"),
    ("Answer: I", "I"), ("The answer is I.", "I"),
]  # fmt: skip
WRONG_ARTICLES = [
    ("A good question", "A"), ("A matter of taste.", "A"), ("The answer is a matter of debate", "A"),
    ("I think so", "I"), ("I", "A"), ("The answer is A good one", "A"), ("I cannot say", "I"),
    ("Answer: I do not know", "I"), ("As an assistant I cannot", "A"), ("I'm not sure", "I"), ("A or B", "A"),
    ("An apple", "A"),
]  # fmt: skip

RIGHT_STRINGS: list[Case] = [
    ("Paris", "Paris"), (" Paris\n", "Paris"), ("Paris.", "Paris"), ("**Paris**", "Paris"), ("`Paris`", "Paris"),
    ('"Paris"', "Paris"), ("“Paris”", "Paris"), ("'Paris'", "Paris"), ("*Paris*", "Paris"),
    ("Answer: Paris", "Paris"), ("The answer is Paris.", "Paris"), ("**Answer:** Paris", "Paris"),
    ("\\boxed{Paris}", "Paris"), ("$\\text{Paris}$", "Paris"), ("\\boxed{\\text{Paris}}", "Paris"),
    ("New  York", "New York"), ("New\u00a0York", "New York"), ("paris", "Paris", {"ignore_case": True}),
    ("STRASSE", "straße", {"ignore_case": True}), ("b", ["a", "b"]),
    ("I thought about it.\n\nAnswer: Paris", "Paris"), ("it’s", "it's"), ("−1", "-1"), ("a.", "a."), ("...", "..."),
    ("x = 1", "x = 1"), ("U.S.", "U.S."), ("```\nls -l\n```", "ls -l"), ("Paris\u200b", "Paris"),
]  # fmt: skip
WRONG_STRINGS: list[Case] = [
    ("", "Paris"), ("paris", "Paris"), ("PARIS", "Paris"), ("Not Paris", "Paris"), ("Paris or London", "Paris"),
    ("Paris, Texas", "Paris"), ("The answer is not Paris", "Paris"), ("It is Paris, I think", "Paris"),
    ("Pari", "Paris"), ("Paris!", "Paris"), ("ParisParis", "Paris"), ("Answer: London. Paris is nice.", "Paris"),
    ("c", ["a", "b"]), ("ab", ["a", "b"]), ("Answer: Paris\nAnswer: London", "Paris"),
    ("\\boxed{London} (not Paris)", "Paris"), ("P a r i s", "Paris"), ("Раris", "Paris"), ("1.0", "1"), ("-1", "1"),
    ("a b", "ab"), ("Par is", "Paris"),
]  # fmt: skip

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^A"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ADA = {"equals": {"name": "Ada", "age": 36}}
RIGHT_JSON: list[Case] = [
    ('{"name": "Ada", "age": 36}', PERSON), ('{"age":36,"name":"Ada"}', PERSON, ADA),
    ('\n{"name":"Ada","age":36}\n', PERSON), ('```json\n{"name":"Ada","age":36}\n```', PERSON, ADA),
    ('```\n{"name":"Ada","age":36}\n```', PERSON), ('~~~json\n{"name":"Ada","age":36}\n~~~', PERSON),
    ('Here it is:\n\n```json\n{"name":"Ada","age":36}\n```\nDone.', PERSON),
    ('```JSON\n{"name":"Ada","age":36}\n```', PERSON), ('Here it is: {"name":"Ada","age":36}.', PERSON, ADA),
    ('{"name":"\\u0041da","age":36}', PERSON, ADA), ('{"name":"Ada","age":36.0}', PERSON, ADA),
    ('{"name":"Ada","age":3.6e1}', PERSON, ADA), ('```python\nx\n```\n```json\n{"name":"Ada","age":36}\n```', PERSON),
    ('List: [{"a": 1}]', {"type": "array"}), ("[1, 2]", {"type": "array"}, {"equals": [1, 2]}),
    ("null", {"type": "null"}), ("true", {"const": True}), ('"x"', {"type": "string"}), ("5", {"type": "integer"}),
    ("The list: [1, 2]", {"type": "array"}), ('{"a":{"b":[{}]}}', True), ("{}", {"type": "object"}),
    ('{"a": "```"}', {"type": "object"}), ('{"x":1}', {"anyOf": [{"required": ["y"]}, {"required": ["x"]}]}),
    ('{"x":{"x":{}}}', {"$ref": "#/$defs/t", "$defs": {"t": {"properties": {"x": {"$ref": "#/$defs/t"}}}}}),
]  # fmt: skip
WRONG_JSON: list[Case] = [
    ("", PERSON), ("Ada, 36", PERSON), ('{"name":"Ada"}', PERSON), ('{"name":"Ada","age":"36"}', PERSON),
    ('{"name":"Ada","age":36', PERSON), ("{'name':'Ada','age':36}", PERSON), ('{"name":"Ada","age":36,}', PERSON),
    ('{"name":"Ada","age":36,"x":1}', PERSON), ('{"name":"Bob","age":36}', PERSON),
    ('{"name":"Ada","age":-1}', PERSON), ('{"name":"Ada","age":37}', PERSON, ADA),
    ('{"name":"Ada","age":true}', PERSON), ('{"name":"Ada","age":36.5}', PERSON),
    ('{"name":"Ada","age":NaN}', PERSON), ('{"name":"Bob","age":1,"name":"Ada"}', PERSON),
    ('[{"name":"Ada","age":36}]', PERSON),
    ('```json\n{"name":"Ada","age":36}\n```\n```json\n{"name":"Amy","age":3}\n```', PERSON),
    ('{"name":"Ada","age":36} or {"name":"Amy","age":3}', PERSON),
    ('{"name":"Ada","age":36} // done', PERSON, {"strict": True}),
    ('```json\n{"name":"Ada","age":36}\n```', PERSON, {"strict": True}), ("undefined", True),
    ("{name: 1}", {"type": "object"}), ("[1, 2]", {"type": "array"}, {"equals": [2, 1]}),
    ("1", {"type": "integer"}, {"equals": True}), ("true", {"const": 1}), ('"1"', {"type": "integer"}),
    ("[" * 100_000, True), ("1" * 5000 + "x", True), ('{"a":1}', {"required": ["b"]}),
    ('```json\n{"name":"Ada","age":36}', PERSON, {"strict": True}),
]  # fmt: skip

RIGHT_PATTERNS: list[Case] = [
    ("on 2024-12-31.", r"\b2024-12-31\b"), ("ABC", "abc", {"ignore_case": True}), (" abc \n", "abc", {"whole": True}),
    ("line one\nline two", r"(?m)^line two$"), ("x1", r"[a-z]\d"), ("é", r"^\w$"), ("aaa", "a+", {"whole": True}),
]  # fmt: skip
WRONG_PATTERNS: list[Case] = [
    ("on 2024-12-30.", r"\b2024-12-31\b"), ("ABC", "abc"), ("xabc", "abc", {"whole": True}), ("", "x"),
    ("12024-12-31", r"\b2024-12-31\b"), ("a" * 5000 + "!", r"(a+)+$"), ("a" * 50_000, r"(a|a)*b"),
    ("line\ntwo", "line.two"),
]  # fmt: skip
