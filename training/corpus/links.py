"""Phrases that link a name to its value, assembled from parts, so that training sees many words and no fixed ones.

The linking words of the "hard" split ("ought to be", "pick ... as", "being") link nothing in training: they
occur only in other sentences (the asides of ``training.corpus.wishes``).
"""

from __future__ import annotations

from training.corpus.base import Draw

_OWNERS = (
    "",
    "the ",
    "my ",
    "our ",
    "its ",
    "a ",
    "that ",
    "this ",
    "your ",
    "their ",
    "the wanted ",
    "the new ",
)
_MODALS = (
    "should", "must", "will", "may", "might", "can", "shall", "would", "could", "has to", "needs to", "is to", "is going to",
    "is supposed to", "is meant to", "is expected to", "gets to", "had better", "is about to", "is said to", "seems to",
    "does", "I want to", "is known to",
)  # fmt: skip
_ADVERBS = (
    "",
    "",
    "",
    "",
    "now ",
    "just ",
    "simply ",
    "exactly ",
    "then ",
    "also ",
    "always ",
    "probably ",
    "clearly ",
    "still ",
)
_STATES = (
    "be", "be", "be", "be", "equal", "read", "say", "show", "become", "stay", "remain", "have", "hold", "contain", "match", "be at",
    "be set to", "be called", "be changed to", "be given as", "turn into", "go to", "start at", "be put at", "come to", "stand at",
    "be fixed at", "be written as", "get", "be filled with", "be around",
)  # fmt: skip
_FINITE = (
    "is", "is", "was", "equals", "reads", "says", "shows", "becomes", "stays", "remains", "holds", "contains", "matches", "has",
    "comes to", "amounts to", "goes to", "stands at", "lies at", "sits at", "gets", "receives", "takes", "means", "gives", "is now",
    "is just", "is simply", "is exactly", "is still", "is called", "is given as", "turned out as", "changed to", "looks like",
    "starts at", "has become", "has been", "went to", "is fixed at", "counts", "asks for", "=>", "-", "--", "==", ":=", "...",
)  # fmt: skip
_PARTICIPLES = (
    "set to", "fixed at", "given as", "chosen as", "entered as", "listed as", "noted as", "marked as", "kept at", "left at", "put at",
    "named", "called", "specified as", "defined as", "written as", "changed to", "equal to", "like", "at", "of", "equalling", "reading",
    "showing", "saying", "having", "holding", "containing", "becoming", "remaining", "staying", "matching", "meaning", "about",
)  # fmt: skip
_SUBJECTS = ("", "", "", "I ", "we ", "you can ", "please ", "let us ", "I will ", "we'll ", "you should ", "I must ", "they ", "I'll ",
             "do ", "just ", "then ", "also ", "you may ", "we had to ", "everybody wants to ", "now ")  # fmt: skip
_ACTS = (
    "take", "use", "choose", "write", "put", "enter", "give", "set", "select", "apply", "insert", "add", "try", "keep", "store", "note",
    "record", "assign", "pass", "send", "provide", "supply", "consider", "accept", "want", "need", "prefer", "have", "say", "make it",
    "go with", "settle on", "decide on", "like", "fill in", "type", "state", "mean", "suggest", "request", "mark", "leave", "see",
    "regard", "list", "place", "adopt", "employ", "require",
)  # fmt: skip
_ROLES = ("as", "for", "into", "under", "in", "to", "as a", "as value of", "as the value for", "on", "at", "within", "for its", "as our",
          "as my", "for the", "as the", "in the", "under the", "into the", "to the", "by way of", "by", "for this")  # fmt: skip
_FIRST = (
    "{v} is {o}{s}", "{v} becomes {o}{s}", "{v} was {o}{s}", "{v} makes {o}{s}", "{v} goes {r} {s}", "{v} stands {r} {s}",
    "{v} {r} {s}", "{v} - that is {o}{s}", "{v} gives {o}{s}", "{v}, which is {o}{s}", "{v} shall be {o}{s}", "{v} fits {r} {s}",
)  # fmt: skip
_HELD = frozenset(
    (
        "the {s} should be {v}", "with the {s} {v}", "the {s} will be {v}", "use {v} as the {s}", "the {s} ought to be {v}",
        "pick {v} as the {s}", "with {s} being {v}", "I take {v} as the {s}",
    )
)  # fmt: skip
_UNSEEN = ("ought", "pick", "being")  # they join names and values in "hard"
# Words of any kind: some of them link a name to a value that cannot be mistaken.
FILLERS = (
    "about", "after", "again", "against", "all", "along", "already", "among", "around", "back", "because", "before", "begin", "below",
    "better", "between", "both", "bring", "build", "call", "carry", "catch", "cause", "check", "claim", "close", "come", "consider",
    "cover", "create", "cut", "deal", "deserve", "draw", "drive", "drop", "end", "enjoy", "even", "every", "expect", "explain", "face",
    "fall", "feel", "few", "find", "finish", "fit", "fix", "follow", "force", "form", "get", "grow", "happen", "hear", "help", "here",
    "hit", "hope", "imagine", "include", "indeed", "intend", "join", "judge", "keep", "know", "last", "lay", "lead", "learn", "less",
    "lie", "like", "likely", "live", "look", "lose", "love", "maintain", "manage", "many", "maybe", "mention", "more", "most", "much",
    "near", "never", "next", "only", "open", "order", "other", "own", "perhaps", "plan", "play", "point", "prepare", "present", "produce",
    "promise", "prove", "pull", "push", "quite", "raise", "rather", "reach", "really", "receive", "recommend", "refer", "report",
    "represent", "rest", "result", "run", "see", "seem", "serve", "share", "some", "soon", "speak", "spend", "start", "stop", "such",
    "support", "suppose", "talk", "tell", "than", "think", "tie", "together", "total", "touch", "travel", "treat", "turn", "under",
    "until", "upon", "very", "wait", "walk", "watch", "wear", "well", "when", "while", "win", "wish", "without", "wonder", "work", "worth",
)  # fmt: skip


def link(draw: Draw, is_plain: bool) -> str:
    """Returns a pattern with {s} and {v}. ``is_plain``: a lower-case value, which might seem to include other words."""
    while True:
        pattern = _strange(draw, is_plain) if draw.chance(0.25 if is_plain else 0.4) else _made(draw)
        if pattern not in _HELD:
            return pattern


def _made(draw: Draw) -> str:
    owner, which = draw.pick(_OWNERS), draw.rng.random()
    if which < 0.3:
        return f"{owner}{{s}} {draw.pick(_MODALS)} {draw.pick(_ADVERBS)}{draw.pick(_STATES)} {{v}}"
    if which < 0.48:
        return f"{owner}{{s}} {draw.pick(_FINITE)} {{v}}"
    if which < 0.62:
        start = draw.pick(("with ", "", "and ", "where ", "having ", "given ", "for "))
        return f"{start}{owner}{{s}} {draw.pick(_PARTICIPLES)} {{v}}"
    if which < 0.88:
        return f"{draw.pick(_SUBJECTS)}{draw.pick(_ACTS)} {{v}} {draw.pick(_ROLES)} {{s}}"
    return str(draw.pick(_FIRST)).format(v="{v}", s="{s}", o=owner, r=draw.pick(_ROLES))


def _strange(draw: Draw, is_plain: bool) -> str:
    """Returns a pattern with meaningless words between name and value; common words if the value is a plain word."""
    owner, role = draw.pick(_OWNERS), draw.pick(_ROLES)
    words = [draw.word() if not is_plain and draw.chance(0.4) else draw.pick(FILLERS) for _ in range(3)]
    a, b, c = ("very" if word in _UNSEEN else word.lower() for word in words)
    ways = (
        f"{owner}{{s}} {a} {{v}}", f"{owner}{{s}} {a} to {b} {{v}}", f"{owner}{{s}} {a} {b} {{v}}", f"with {owner}{{s}} {a} {{v}}",
        f"with {{s}} {a} {{v}}", f"{a} {{v}} {role} {{s}}", f"I {a} {{v}} {role} {{s}}", f"{a} {{v}} {b} {{s}}", f"we {a} {{v}} {role} {{s}}",
        f"{owner}{{s}} {a} {b} {c} {{v}}", f"{a} {{v}} as the {{s}}", f"I {a} {{v}} as the {{s}}", f"the {{s}} {a} to be {{v}}",
    )  # fmt: skip
    return str(draw.pick(ways))
