"""Descriptions of made-up tools, and requests for them."""

from __future__ import annotations

from training.corpus.base import Phrases

VERBS = (
    "get", "find", "create", "book", "send", "delete", "list", "check", "open", "update", "search", "set", "add", "cancel",
    "show", "fetch", "start", "stop", "order", "read", "play", "lookup", "compute", "track", "reserve", "query",
    "make", "buy", "pay", "calculate", "convert", "turn", "close", "save", "load", "move", "copy", "rename", "print", "plan", "schedule",
    "remove", "register", "measure", "count", "describe", "translate", "explain", "publish", "write", "call", "change", "edit", "control",
)  # fmt: skip
DESCRIPTIONS = Phrases(
    (
        "{V} the {n}", "{V} a {n}.", "{V}s the {n} for the user", "Use this to {v} a {n}.", "Lets you {v} the {n}.",
        "{V} {n} data.", "{V} the current {n}", "{V} the {n}.", "{V} a {n} for the user", "A tool to {v} the {n}.",
        "This function {v}s the {n}.", "{V} any {n}. Returns JSON.", "The {n}", "{V} a {n} by {p}.", "Returns the {n}",
        "{V} a new {n}", "{V} the {n} with this {p}", "Retrieve the {n} for a specified {p}", "Given a {p}, {v} the {n}", "{V}s the {n} that belongs to a {p}.", "Allows the user to {v} a {n}",
        "{V} {n} information for a location", "{V} the {n} based on the {p}", "{V} detailed {n} information", "{V} the {n} of a given {p}",
        "This tool {v}s the {n}. Use it when the user asks for the {n}.", "{V} one or more {n} entries by {p}. Returns a JSON object.",
        "Useful to {v} a {n}; needs the {p}.", "{V} the latest {n}", "{V} {n} using the provided {p}", "Helper that {v}s {n} records for the current account",
        "{V} the {n} from our system. The {p} must be given by the user.", "API to {v} the {n}", "{V} the {n} matching certain criteria", "Tool that can {v} {n}", "{V} {n}",
    ),
    ("Call this to {v} {n}.",),
    ("{V} the {n} of the given {p}.", "Function to {v} a {n} of the user"),
)  # fmt: skip
# {v}: the verb, {n}: its object; inserted into one of the phrasings of training.corpus.wishes.
ORDERS = Phrases(
    (
        "{v} the {n}", "{v} the {n}", "{v} the {n}", "{v} a {n}", "{v} me the {n}", "{v} my {n}", "{v} {n}", "{v} our {n}",
        "{v} this {n}", "{v} another {n}", "{v} some {n}", "{v} the {n} now", "{v} the new {n}",
    ),
    ("{v} the {n}",),
    ("{v} the {n}", "{v} a {n}", "{v} us the {n}", "{v} that {n}", "{v} one {n}"),
)  # fmt: skip
NEEDS = Phrases(
    (
        "I need the {n}", "Use the {n} tool", "Give me the {n}", "What is the {n}", "The {n} please", "I need a {n}", "{n} please",
        "I want the {n}", "We need the {n}", "What about the {n}", "Tell me the {n}", "I am looking for the {n}", "{n}",
        "Call the {n} tool", "Get me the {n}", "What's the {n}", "Do the {n}", "Run the {n} tool", "I want a {n}", "Use {n}",
        "Call {n}", "Where is the {n}", "How is the {n}", "Which {n} is it", "I would love a {n}", "Time for the {n}", "Bring me the {n}",
    ),
    (),
    ("May I have the {n}", "I could use the {n}", "Let me see the {n}", "Apply the {n} tool", "I want to know the {n}"),
)  # fmt: skip
# One value without the name of its parameter.
ABOUT_ONE = Phrases(
    (
        "What is the {n} of {x}?", "What is the {n} for {x}?", "What is the {n} in {x}?", "How is the {n} in {x}?", "{n} of {x}",
        "{n} in {x}", "{n} {x}", "{n} for {x}, please.", "{X}: {n}", "{X} {n}", "Show the {n} of {x}.", "Tell me the {n} of {x}.",
        "Tell me the {n} in {x}", "I need the {n} for {x}.", "I need the {n} of {x}", "Give me {x}'s {n}.", "Which {n} has {x}?",
        "Which {n} does {x} have?", "What {n} does {x} have?", "For {x} I need the {n}.", "In {x}, what is the {n}?",
        "What about the {n} in {x}?", "What is {x}'s {n}?", "Do you know the {n} of {x}?", "Is there a {n} in {x}?",
        "How much {n} has {x}?", "How many {n} are in {x}?", "I want to know the {n} of {x}.", "Can you tell me the {n} for {x}?",
        "Could you find out the {n} in {x}?", "Get me the {n} from {x}.", "I am in {x}. What is the {n}?", "The {n} of {x}, please",
        "How's the {n} at {x}?", "What's the {n} of {x}?", "What's the {n} in {x} today?", "The {n} called {x}", "{n} named {x}",
        "I am looking for the {n} of {x}", "Do we have a {n} for {x}?", "About {x}: the {n}?", "Where is the {n} of {x}?",
    ),
    (),
    (
        "What's the {n} for {x}?", "I'd like to know the {n} of {x}.", "Could you tell me the {n} in {x}?", "Let me know the {n} of {x}.",
        "Please tell me the {n} for {x}.", "For {x}, what is the {n}?", "What would be the {n} of {x}?",
    ),
)  # fmt: skip
