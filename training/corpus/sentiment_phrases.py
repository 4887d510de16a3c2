"""Requests to label a text, assembled from parts, and positive or negative sentences without a template. {x}: the text."""

from __future__ import annotations

from training.corpus.base import Draw

_VERBS = (
    "classify", "label", "tag", "rate", "judge", "mark", "check", "file", "assess", "evaluate", "grade", "sort", "categorise", "record", "save", "note", "log", "analyse", "analyze", "review", "look at", "consider", "take", "determine", "find", "report",
    "submit", "run it on", "please classify", "please label", "please rate", "please mark", "can you classify", "can you tag", "could you judge", "I want you to label", "now do", "go on with", "deal with", "please analyse", "tell me", "work on",
    "process", "decide", "handle", "score", "please tag", "would you grade", "put a label on", "have a look at",
)  # fmt: skip
_OBJECTS = (
    "this", "this", "it", "this one", "the following", "this text", "this review", "this comment", "this message", "this sentence", "this feedback", "what follows", "the text below", "the mood of this", "the mood of this one", "the tone of this", "the feeling in this",
    "the sentiment of this one", "the sentiment here", "the attitude in this", "how this sounds", "what this person thinks", "the opinion below", "this line", "this remark", "the next text", "this customer's words", "the mood", "the sentiment", "the tone",
    "that one", "the tone of the next one", "this entry", "the attitude", "this statement", "the emotion here",
)  # fmt: skip
_ENDS = (
    ": ",
    ": ",
    ": ",
    ". ",
    " -> ",
    " - ",
    "\n",
    ":\n",
    ", please: ",
    " please. ",
    "! ",
    "... ",
    " for me: ",
    " with the tool: ",
    " now: ",
    " by function: ",
)
_QUESTIONS = (
    "How would you label this?", "How would you label it?", "What mood is it?", "Is it positive?", "What do you make of this?", "How does it sound?", "Is the writer pleased?", "Which label fits?", "What is the tone?", "Is that praise?", "Positive or not?",
    "How does this person feel?", "What would you call this?", "Happy or unhappy?", "Which category is it?", "How positive is this?", "Is this a complaint?", "What sentiment does it show?", "What feeling is in it?", "Does the customer like it?", "And this one?",
    "What is your verdict?", "Was this person content?", "Good or not?", "What attitude is this?", "How is the mood?", "Is the customer satisfied?", "What class is it?",
)  # fmt: skip
_INTROS = (
    "A customer wrote: ", "Customer: ", "New review: ", "Comment: ", "Next: ", "Here is one: ", "User feedback: ", "From the survey: ", "Another one: ", "Review number {n}: ", "Someone said: ", "Text: ", "Feedback: ", "A guest says: ", "Our buyer writes: ",
    "Posted yesterday: ", "Mail from a client: ", "Tweet: ", "Message {n}: ", "Number {n}: ", "Today's comment: ", "Guest book: ", "Heard in the shop: ", "One visitor wrote: ", "They wrote: ", "The next text: ",
)  # fmt: skip
_TAILS = (" (label it)", " <- label", " - which label?", " Please classify.", " How does that sound?", " Classify that.", " Label this, please.", "\nSentiment?", "\nLabel?", " What is the mood?", " <- mood?", " Tag it.", " Record that.", " Which label?",
          " Is that positive?", " Save this one.", " Please rate it.", " => sentiment", " (mood?)", " Now label it.", " - how would you class it?", " Judge that, please.")  # fmt: skip
_BY_NAME = (
    "Run {t} on this: ",
    "Call {t} for this: ",
    "Use {t}: ",
    "{t}: ",
    "Use {t} on: ",
    "Please call {t}. ",
    "{t} this: ",
    "Run {t}: ",
    "Apply {t} to this: ",
    "Try {t} with: ",
    "Do a {t} call: ",
    "Let {t} handle: ",
    "Send this to {t}: ",
)


def order(draw: Draw, name: str) -> str:
    """Returns a pattern with {x}, the text, within other words."""
    kind = draw.rng.random()
    if kind < 0.4:
        asked = f"{draw.phrase(_VERBS)} {draw.phrase(_OBJECTS)}"
        head = (asked[0].upper() + asked[1:] if draw.chance(0.8) else asked) + draw.pick(_ENDS)
    elif kind < 0.6:
        head = draw.phrase(_QUESTIONS) + draw.pick((" ", " ", "\n"))
    elif kind < 0.72:
        head = draw.phrase(_INTROS).format(n=draw.integer(1, 99))
    elif kind < 0.82:
        head = draw.phrase(_BY_NAME).format(t=name)
    else:
        return "{x}" + draw.phrase(_TAILS)
    tail = draw.phrase(_TAILS) if draw.chance(0.08) else ""
    return head + draw.pick(("{x}", "{x}", "{x}", '"{x}"')) + tail


_GOOD = (
    "I absolutely love it", "we had so much fun", "they were so kind to us", "everything worked at once", "I would give it six stars", "it fits like a glove", "I laughed all evening", "a real bargain", "such a treat", "it made me smile", "they fixed it in minutes",
    "I am over the moon", "my kids adore it", "the best thing I own", "I felt at home", "what a pleasure", "great value for money", "well done", "it runs like clockwork", "they answered right away", "so well made", "a dream come true", "it was heaven",
    "I keep coming back", "truly inspiring", "they thought of everything", "a hidden gem", "the best I ever had", "I was blown away", "top quality", "first class", "it solved my problem", "a wonderful surprise", "I could not ask for more", "they treated us like family",
    "it looks even better than in the picture", "friendly people and a great mood", "my favourite place in town", "it lasts for ever", "the kids were happy", "a huge success", "everybody was smiling", "it saved my day", "so easy to use", "they deserve praise",
    "it is worth the money", "I am a fan now", "a lovely evening", "great job", "it could not have gone better", "it works like magic", "she was delighted", "my wife is thrilled", "a perfect gift", "a pleasure from first to last", "they kept their promise",
)  # fmt: skip
_BAD = (
    "I absolutely hate it", "we were bored", "they ignored us", "nothing worked", "I would give it no stars", "it fell apart", "I almost fell asleep", "a total rip-off", "such a shame", "it made me cry", "they never called back", "I am fed up", "my kids hate it",
    "the worst thing I own", "I felt cheated", "what a waste", "far too much money for this", "badly made", "it keeps failing", "they hung up on me", "it was a nightmare", "I will not return", "it gave me a headache", "they lied to us", "a tourist trap",
    "the worst I ever had", "I was shocked", "low quality", "a bad joke", "it made things worse", "a nasty surprise", "I expected much more", "they treated us like dirt", "it looks nothing like the picture", "unkind people and long queues", "it lasted one day",
    "I got sick", "a complete failure", "everybody was complaining", "it ruined my trip", "so hard to use", "they should be ashamed", "it is not worth the money", "I want to send it back", "a horrible evening", "it leaks", "it smells", "the waiter was rude to us",
    "it never worked", "I waited for three hours", "they charged me twice", "it arrived in pieces", "half of it was missing", "a scam", "my order got lost", "the paint came off", "it tore at once", "it was stale and tasteless", "the handle broke off",
)  # fmt: skip


def clause(draw: Draw, label: str) -> str:
    """Returns one or two short sentences that name no thing."""
    first = draw.phrase(_GOOD if label == "positive" else _BAD)
    end = draw.pick((".", ".", ".", "!"))
    joined = first
    if draw.chance(0.35):
        joined = (
            f"{first}{draw.pick((', and ', '. ', ', '))}{draw.phrase(_GOOD if label == 'positive' else _BAD)}"
        )
    head, dot, rest = joined.partition(". ")
    rest = rest[:1].upper() + rest[1:]
    return head[0].upper() + head[1:] + dot + rest + end
