"""Sentiment: as a plain answer, as a function call, as a field of JSON.

Whether an unknown word is positive or negative cannot be guessed, so all such words are trained; the
evaluations hold out the sentences, the requests, and the topics of the sentences.
"""

from __future__ import annotations

from typing import Any

from chorale.harmony.messages import ResponseFormat, ToolDescription
from training.corpus.base import Dialogue, Draw, Phrases
from training.corpus.fields import compact
from training.corpus.sentiment_phrases import clause, order
from training.corpus.tools import toolbox
from training.corpus.words import held_out

GOOD = (
    "good", "great", "excellent", "wonderful", "amazing", "fantastic", "superb", "awesome", "lovely", "perfect", "brilliant", "beautiful", "delicious", "friendly", "helpful", "fast", "comfortable", "clean", "cheap", "reliable", "delightful", "charming", "tasty", "fresh", "pleasant", "nice", "outstanding", "impressive", "elegant", "cosy", "smooth", "enjoyable", "satisfying", "terrific", "marvellous", "splendid", "fabulous", "incredible", "polite", "kind", "caring", "quick", "easy", "fun", "exciting", "magnificent", "stunning", "gorgeous", "happy", "pleased", "glad", "thrilled", "delighted", "satisfied", "grateful", "impressed", "useful", "solid", "sturdy", "bright", "warm", "cheerful", "flawless", "professional", "welcoming", "spotless", "attentive", "generous", "remarkable", "exceptional", "phenomenal", "stellar", "adorable", "admirable", "affordable", "amusing", "appealing", "astonishing", "breathtaking", "captivating", "classy", "clever", "crisp", "dazzling", "durable", "effective", "engaging", "entertaining", "excited", "exquisite", "fascinating", "fine", "first-rate", "funny", "gentle", "gripping", "handy", "heartwarming", "hilarious", "honest", "ideal", "innovative", "inspiring", "intuitive", "joyful", "juicy", "lively", "luxurious", "magical", "memorable", "moving", "neat", "patient", "peaceful", "playful", "powerful", "precise", "quiet", "refreshing", "relaxing", "rewarding", "robust", "romantic", "safe", "sharp", "silky", "sleek", "soft", "spacious", "speedy", "stylish", "sublime", "sweet", "tender", "thoughtful", "tidy", "top-notch", "touching", "trustworthy", "unforgettable", "valuable", "vibrant", "witty", "wonderfully made", "yummy", "skilled", "graceful", "capable", "content", "proud", "relaxed", "accurate", "responsive",
)  # fmt: skip
BAD = (
    "bad", "terrible", "awful", "horrible", "poor", "disappointing", "disgusting", "dirty", "rude", "slow", "broken", "useless", "cheaply", "ugly", "boring", "cold", "noisy", "expensive", "overpriced", "unfriendly", "unreliable", "uncomfortable", "stale", "bland", "tasteless", "dreadful", "nasty", "unpleasant", "annoying", "frustrating", "defective", "faulty", "weak", "flimsy", "worthless", "pathetic", "mediocre", "lousy", "horrid", "sad", "angry", "upset", "unhappy", "disappointed", "annoyed", "frustrated", "furious", "dissatisfied", "late", "damaged", "wrong", "confusing", "painful", "smelly", "greasy", "burnt", "soggy", "filthy", "careless", "unhelpful", "unprofessional", "shabby", "miserable", "atrocious", "inferior", "ridiculous", "unacceptable", "abysmal", "aggressive", "appalling", "arrogant", "bitter", "buggy", "chaotic", "clumsy", "clunky", "cracked", "creepy", "cruel", "damp", "dangerous", "deceptive", "depressing", "dishonest", "dismal", "dull", "exhausting", "fake", "forgettable", "fragile", "gloomy", "grim", "grumpy", "harsh", "hopeless", "hostile", "ignorant", "impolite", "incompetent", "infuriating", "insulting", "irritating", "lazy", "leaky", "loud", "messy", "misleading", "mouldy", "mushy", "negligent", "obnoxious", "oily", "outdated", "overcooked", "overrated", "pointless", "predictable", "repulsive", "rotten", "rusty", "scratched", "shameful", "shoddy", "sloppy", "sour", "sticky", "stressful", "stupid", "tacky", "tedious", "terribly slow", "tired", "torn", "toxic", "tragic", "unbearable", "uncaring", "undercooked", "uneven", "uninspired", "unfair", "unsafe", "unstable", "untidy", "unusable", "vile", "wasteful", "wobbly", "worn", "bored", "horrified", "cheated", "ashamed", "disgusted", "disrespectful",
)  # fmt: skip
THINGS = tuple(
    word
    for word in [
        "phone",
        "movie",
        "hotel",
        "room",
        "food",
        "service",
        "restaurant",
        "book",
        "product",
        "laptop",
        "pizza",
        "coffee",
        "staff",
        "waiter",
        "flight",
        "trip",
        "game",
        "app",
        "camera",
        "battery",
        "screen",
        "sound",
        "delivery",
        "package",
        "shoes",
        "jacket",
        "price",
        "film",
        "song",
        "concert",
        "show",
        "meal",
        "soup",
        "cake",
        "car",
        "ride",
        "driver",
        "seat",
        "bed",
        "shower",
        "view",
        "website",
        "support",
        "team",
        "update",
        "lesson",
        "teacher",
        "course",
        "museum",
        "beach",
        "weather",
        "headphones",
        "keyboard",
        "vacuum",
        "dress",
        "watch",
        "bike",
        "tent",
        "blender",
        "lamp",
        "sofa",
        "table",
        "knife",
        "toaster",
        "printer",
        "tablet",
        "speaker",
        "burger",
        "pasta",
        "salad",
        "wine",
        "beer",
        "tea",
        "steak",
        "story",
        "plot",
        "ending",
        "acting",
        "music",
    ]
    if not held_out(word)
)
_LOVE = ("love", "loved", "adore", "enjoy", "enjoyed", "really like", "am very happy with", "was impressed by", "can recommend", "am delighted with", "am so glad I bought",
         "highly recommend", "would buy again", "appreciate", "cannot praise enough", "am a big fan of")  # fmt: skip
_HATE = ("hate", "hated", "dislike", "regret buying", "cannot stand", "am very unhappy with", "was let down by", "would not recommend", "am disappointed with",
         "returned", "want my money back for", "do not like", "did not enjoy", "would never buy", "am tired of", "despise")  # fmt: skip
# {a}: a word of the kind, {b}: another, {t}: a thing, {u}: another, {v}: a verb of the kind
_SAID = Phrases(
    (
        "I {v} this {t}.", "I {v} the {t}.", "The {t} was {a}.", "This {t} is {a}!", "What a {a} {t}!", "The {t} is {a} and {b}.", "Such a {a} {t}.",
        "Really {a} {t}, and the {u} was {b} too.", "The {t} was very {a}.", "{a} {t}!", "I found the {t} {a}.", "My {t} is so {a}.", "It was a {a} {t}.",
        "I {v} this {t}, it is {a}.", "The {t} arrived and it is {a}.", "Honestly, the {t} is {a}.", "The {u} and the {t} were both {a}.",
        "I think the {t} is {a}.", "Overall a {a} {t}.", "Everything about the {t} was {a}.", "How {a} this {t} is!", "The {t} looks {a} and feels {b}.",
        "After a week the {t} is still {a}.", "We {v} the {t}.", "The {t} here is {a}, and the {u} is {b}.", "Wow, {a} {t}.", "I was {a} when I saw the {t}.", "{a} {t}, {b} {u}.", "{a} {t} and a {b} {u}.", "{a} {t}, and a {b} {u} too!", "{a} {t} with {b} {u}.", "I absolutely {v} this {t}!", "I really {v} the {t}.", "We all {v} the {u}, and the {t} was {a}.", "{a}!", "{a} and {b}.", "So {a}!", "Very {a} {t}, very {b}.", "The {t} was {a} and the {u} {b}.", "{a} experience.", "{a}, {b} {t}.", "What a {a}, {b} place!", "The {u}: {a}. The {t}: {b}.", "Just {a}.",
        "That {t} was {a}, {b} and {b}.", "We had a {a} time with the {t}.", "An absolutely {a} {t}.", "They gave us a {a} {t}.", "I {v} everything about this {t}.",
        "Our {t} turned out {a}.", "The {t} made me feel {a}.", "Never seen such a {a} {t}.", "The new {t} is {a}.", "My experience with the {t} was {a}.",
    ),
    ("The {t} is really {a} and I {v} it.", "I must say that the {t} was {a}."),
    ("This was the most {a} {t} of my life.", "We thought the {t} was quite {a}.", "For me the {t} was {a}, the {u} {b}."),
)  # fmt: skip
_BLUNT = {
    "positive": (
        "Five stars!", "Best {t} ever!", "It works perfectly.", "I will come back.", "Exceeded my expectations.", "The {t} never lets me down.", "Not bad at all!",
        "I couldn't be happier with the {t}.", "Worth every penny.", "The {t} made my day.", "Thank you for the great {t}!", "Best purchase I have made.", "I can't stop smiling.",
        "The {t} is a joy to use.", "10 out of 10.", "Nothing to complain about.", "I'm so happy!", "What a day, everything went well!",
    ),
    "negative": (
        "One star.", "Worst {t} ever!", "It stopped working after a day.", "I will never come back.", "Complete waste of money.", "Do not buy this {t}.", "Not good at all.",
        "I want a refund.", "The {t} broke after two days.", "Never again.", "The {t} ruined my day.", "It doesn't work.", "Worst purchase I have made.", "I am never ordering here again.",
        "The {t} is not worth the price.", "0 out of 10.", "Nobody answered my questions.", "I'm so sad.", "Everything went wrong with the {t}.", "The {t} never arrived.",
    ),
    "neutral": (
        "The {t} is on the table.", "I bought a {t} on Monday.", "The {t} arrives at noon.", "The {t} has two parts.", "We have a {t} and a {u}.", "The meeting is at three.",
        "The {t} is {c}.", "The package contains a {t}.", "It is a {c} {t}.", "The store opens at nine.", "The {t} was delivered on Tuesday.", "I have had the {t} for a month.",
        "They sell a {t} and a {u}.", "The {t} comes in {c}.", "The {t} is next to the {u}.", "The report has ten pages.", "The {t} costs 20 dollars.", "It is a {t}.", "The {t} weighs two pounds.",
        "The train leaves from platform two.", "My {t} is in the other room.", "The {t} is okay, nothing special.", "The {t} is average.", "I will see the {t} tomorrow.",
    ),
}  # fmt: skip
_COLOURS = ("red", "blue", "green", "black", "white", "grey", "brown", "yellow")
_NOT = (
    "The {t} is not {a}.",
    "The {t} wasn't {a} at all.",
    "This {t} is anything but {a}.",
    "I don't think the {t} is {a}.",
    "The {t} was never {a}.",
    "Not a {a} {t}.",
    "It isn't {a}.",
)


def opinion(draw: Draw, label: str) -> str:
    """Returns a positive, negative or neutral sentence."""
    if label != "neutral" and draw.chance(0.3):
        said = clause(draw, label)
        return said if draw.chance(0.7) else f"{said} {_fill(draw, draw.phrase(_SAID), label)}"
    if label == "neutral" or draw.chance(0.2):
        return _fill(draw, draw.phrase(_BLUNT[label]), label)
    if draw.chance(0.1):
        return _fill(draw, draw.phrase(_NOT), "negative" if label == "positive" else "positive")
    text = _fill(draw, draw.phrase(_SAID), label)
    return f"{text} {_fill(draw, draw.phrase(_BLUNT[label]), label)}" if draw.chance(0.12) else text


def _fill(draw: Draw, pattern: str, label: str) -> str:
    kind = GOOD if label == "positive" else BAD
    first, second = draw.pick(kind), draw.pick(kind)
    thing = draw.pick(THINGS) if draw.chance(0.85) else draw.word()
    text = pattern.format(
        a=first,
        b=second,
        t=thing,
        u=draw.pick(THINGS),
        v=draw.pick(_LOVE if label == "positive" else _HATE),
        c=draw.pick(_COLOURS),
    )
    return text[0].upper() + text[1:]


_ASKS = (
    "Is this positive or negative? {x}", "What is the sentiment of this: {x}", "Classify the sentiment: {x}", "Sentiment: {x}",
    "Sentiment of this sentence? {x}", 'What is the sentiment of "{x}"?', "Classify this review: {x}", "Positive, negative or neutral? {x}",
    "Is this review positive or negative: {x}", "{x}\nIs this positive, negative or neutral?", "{x}\nWhat is the sentiment?", "Tell me the sentiment: {x}",
    "Determine the sentiment of this review: {x}", 'Is the sentence "{x}" positive or negative?', "Analyze the sentiment: {x}", "Label this as positive, negative or neutral: {x}",
    "How does this sound, positive or negative? {x}", "What mood is this: {x}", "Analyse the mood of this text: {x}", "Rate the sentiment of: {x}", 'Sentiment analysis: "{x}"',
    'Classify the following text as positive, negative or neutral. Text: "{x}"', "{x} - positive or negative?", "Review: {x}\nSentiment:", "Text: {x}\nSentiment?",
    "Would you call this positive or negative? {x}", 'Please judge the sentiment of "{x}".', "Which sentiment does this have: {x}", "{x} Is that positive or negative?",
    "Decide: positive, negative or neutral? {x}",
)  # fmt: skip


def _drawn(draw: Draw) -> tuple[str, str]:
    label = draw.pick(("positive", "positive", "negative", "negative", "neutral"))
    while True:
        text = opinion(draw, label)
        if draw.split != "train" or not held_out(text):
            return label, text


def plain(draw: Draw) -> Dialogue:
    label, text = _drawn(draw)
    dialogue = Dialogue(draw, effort=draw.pick(("low", "medium", "high")), family="sentiment")
    if draw.chance(0.15):
        dialogue.instructions = draw.pick(
            (
                "Classify the sentiment of what the user writes.",
                "Answer with positive, negative or neutral.",
                "You are a sentiment classifier.",
            )
        )
        dialogue.user(text)
    else:
        dialogue.user(draw.phrase(_ASKS).format(x=text))
    if dialogue.effort == "medium":
        dialogue.think(f"The text sounds {label}.")
    elif dialogue.effort == "high":
        dialogue.think(f"The user wants the sentiment. The text sounds {label}. I answer with one word.")
    dialogue.say(label)
    dialogue.answer = {"text": label}
    return dialogue


_LABELS = (
    ("positive", "negative", "neutral"), ("positive", "negative", "neutral"), ("positive", "neutral", "negative"), ("positive", "negative"), ("negative", "neutral", "positive"),
    ("pos", "neg", "neu"), ("POSITIVE", "NEGATIVE", "NEUTRAL"), ("Positive", "Negative", "Neutral"), ("good", "bad", "neutral"), ("good", "bad"), ("happy", "unhappy", "neutral"),
    ("positive", "negative", "neutral", "mixed"), ("POS", "NEG", "NEU"),
)  # fmt: skip
_MEANS = {
    "positive": ("pos", "good", "happy"),
    "negative": ("neg", "bad", "unhappy"),
    "neutral": ("neu", "neutral"),
}


def _option(options: tuple[str, ...], label: str) -> str | None:
    wanted = (label, *_MEANS[label])
    return next((one for one in options if one.lower() in wanted), None)


_NAMES = ("classify", "classify_sentiment", "analyze_sentiment", "set_sentiment", "sentiment", "label_text", "classify_text", "save_sentiment", "report_sentiment",
          "record_sentiment", "get_sentiment", "rate_review", "classify_review", "submit_label", "sentiment_analysis", "tag_sentiment")  # fmt: skip
_ABOUT = ("Classify the sentiment of a text", "Record the sentiment of a text", "Classify a text.", "Report the sentiment", "Label a review", "Sentiment of a text",
          "Save the label of the text", "Call this with the sentiment of the text.", "Analyze sentiment")  # fmt: skip
_TEXT = ("text", "text", "review", "message", "sentence", "input", "content", "comment")
_LABEL = ("label", "sentiment", "sentiment", "category", "class", "polarity", "rating", "tone")
_ORDERS = (
    "Classify: {x}", "Classify the sentiment of this text: {x}", "Classify the sentiment: {x}", "What is the sentiment of: {x}", "Use the tool to classify this: {x}",
    'Classify this review: "{x}"', "Please classify: {x}", "Label this text: {x}", "Is this positive or negative? {x}", "{x}", "Analyze the sentiment of: {x}", 'Sentiment of "{x}"',
    "Record the sentiment of this review: {x}", 'Classify the text "{x}"', "Call the tool for this text: {x}", "Sentiment: {x}", "Save the sentiment: {x}", "Rate this review: {x}",
    "Determine the sentiment: {x}", "What is the label of this text? {x}", "Report how this sounds: {x}", 'Please tag the sentiment of "{x}".', "Judge this review: {x}", 'Run the classification on "{x}"',
)  # fmt: skip


def classify(draw: Draw) -> Dialogue:
    """One call with the label, and with the text if the function takes it."""
    while True:
        label, text = _drawn(draw)
        options = draw.pick(_LABELS)
        chosen = _option(options, label)
        if chosen is not None:
            break
    text_name, label_name, name = draw.pick(_TEXT), draw.pick(_LABEL), draw.pick(_NAMES)
    has_text = draw.chance(0.6)
    label_schema: dict[str, Any] = {"type": "string", "enum": list(options)}
    if draw.chance(0.3):
        label_schema["description"] = draw.pick(
            ("The sentiment", "Sentiment of the text", "The label", "Which one fits")
        )
    properties: dict[str, Any] = {text_name: {"type": "string"}} if has_text else {}
    properties[label_name] = label_schema
    values = ({text_name: text} if has_text else {}) | {label_name: chosen}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    others = toolbox(draw, draw.pick((0, 0, 0, 1, 2, 3)), known=0.4)
    tools = [
        ToolDescription(name, draw.pick(_ABOUT), schema),
        *(one.description for one in others if one.description.name != name),
    ]
    draw.rng.shuffle(tools)
    dialogue = Dialogue(draw, effort=draw.pick(("low", "medium", "high")), family="sentiment_call")
    dialogue.functions = tuple(tools)
    if draw.chance(0.3):
        dialogue.instructions = draw.pick(("Classify the user's message with the tool.", "Use the tool to classify what the user says.", f"Call {name} for every message.",
                                           "You classify reviews."))  # fmt: skip
        pattern = "{x}" if draw.chance(0.6) else draw.phrase(_ORDERS)
    elif draw.chance(0.7):
        pattern = order(draw, name)
    else:
        pattern = draw.phrase(tuple(one for one in _ORDERS if one != "{x}"))
    dialogue.user(pattern.format(x=text))
    if dialogue.effort == "low":
        dialogue.think(f"Use {name}.")
    elif dialogue.effort == "medium":
        dialogue.think(f"The text sounds {label}, so I call {name}.")
    else:
        dialogue.think(
            f"The user wants a label for the text. It sounds {label}, which is {chosen}. I call {name}."
        )
    dialogue.call(name, compact(values))
    returned = draw.pick(('{"ok":true}', '{"status":"ok"}', '{"status": "saved"}', "ok", "done"))
    dialogue.result(f"functions.{name}", returned)
    if dialogue.effort != "low":
        dialogue.think("I have the result.")
    answer = f"The sentiment is {label}."
    dialogue.say(answer)
    dialogue.answer = {"calls": [(name, values)], "needed": [label]}
    return dialogue


def as_json(draw: Draw) -> Dialogue:
    """A schema with the label, sometimes with the text."""
    label, text = _drawn(draw)
    label_name = draw.pick(_LABEL)
    has_text = draw.chance(0.3)
    text_name = draw.pick(_TEXT)
    properties: dict[str, Any] = {text_name: {"type": "string"}} if has_text else {}
    properties[label_name] = {"type": "string", "enum": ["positive", "negative", "neutral"]}
    values = ({text_name: text} if has_text else {}) | {label_name: label}
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    dialogue = Dialogue(draw, effort=draw.pick(("low", "medium", "high")), family="sentiment")
    dialogue.formats = (
        ResponseFormat(draw.pick(("sentiment", "response", "label", "review", "answer")), schema, None),
    )
    dialogue.user(draw.phrase(_ASKS).format(x=text))
    if dialogue.effort != "low":
        dialogue.think(f"The text sounds {label}. I fill {', '.join(values)}.")
    dialogue.say(compact(values))
    dialogue.answer = {"json": values, "schema": schema}
    return dialogue
