"""Phrases around an imperative such as "book a table": polite or not, and asides before the request."""

from __future__ import annotations

from training.corpus.base import Draw, Phrases

# {x}: an imperative in lower case ("book a table"), {X}: the same with a capital.
WRAPS = Phrases(
    (
        "{X}", "{X}", "{X}", "{x}", "Please {x}", "please {x}", "Can you {x}", "Could you {x}", "Would you {x}", "I want to {x}",
        "I have to {x}", "I need to {x}", "I must {x}", "You should {x}", "Let us {x}", "Let's {x}", "Help me {x}", "Now {x}",
        "Go and {x}", "Go {x}", "Go ahead and {x}", "Try and {x}", "Try to {x}", "I want you to {x}", "I need you to {x}",
        "Be so kind and {x}", "Could you please {x}", "Can you quickly {x}", "Kindly {x}", "Just {x}", "Quickly {x}",
        "It is time to {x}", "Hurry up and {x}", "Come on and {x}", "Be nice and {x}", "Run along and {x}", "Now go and {x}",
        "Stop waiting and {x}", "Make sure to {x}", "Don't forget to {x}", "Remember to {x}", "I'd like you to {x}",
        "I'd like to {x}", "I wish to {x}", "I was told to {x}", "We need to {x}", "We should {x}", "We want to {x}",
        "My boss wants me to {x}", "I am trying to {x}", "Is it possible to {x}", "Are you able to {x}",
        "Do me a favour and {x}", "Feel free to {x}", "Next, {x}", "First {x}", "Today I want to {x}", "As soon as you can, {x}",
        "If possible, {x}", "If you can, {x}", "For me, {x}", "When you have time, {x}", "Assistant, {x}",
        "Dear assistant, please {x}", "Hey, {x}", "OK, {x}", "Ok now {x}", "Alright, {x}", "Well, {x}", "So please {x}",
        "You can {x} now", "Your task is to {x}", "Task: {x}", "To do: {x}", "Request: {x}", "I would love to {x}",
        "I'd be glad if you could {x}", "It would be great if you could {x}", "I wonder if you could {x}", "Will you {x}",
        "Why don't you {x}", "Somebody should {x}", "Someone needs to {x}", "You must {x}", "You have to {x}",
        "You need to {x}", "Use the tool to {x}", "With your tools, {x}", "Good morning, please {x}", "Hi, can you {x}",
        "Hello, I want to {x}", "{X} for me", "{X} now", "{X} please", "{X}, please", "{X} right now", "Please {x} for me",
        "Can you {x} for me", "Could you {x} for us", "Please just {x}", "Please try to {x}", "Please help me {x}",
        "Please be quick and {x}", "please hurry and {x}", "Wake up and {x}", "Sit down and {x}", "I have time now, so {x}",
    ),
    (
        "I would like to {x}", "Can you please {x}", "Help me to {x}", "Would you please {x}", "Please go and {x}",
    ),
    (
        "I'd appreciate it if you could {x}", "Could you possibly {x}", "Do go ahead and {x}", "Let me {x}", "I ask you to {x}",
        "Hello there, {x}", "Can we {x}", "I hope that you can {x}", "Would you kindly {x}", "Be quick and {x}",
    ),
)  # fmt: skip


def wish(draw: Draw, imperative: str) -> str:
    """Returns a request for ``imperative`` (lower case), without the final sign."""
    return draw.phrase(WRAPS).format(x=imperative, X=imperative[0].upper() + imperative[1:])


# Sentences before the request that ask for nothing.
_ASIDES = Phrases(
    (
        "I am in {N}. ", "My name is {N}. ", "We met {N} yesterday. ", "It is late. ", "I have a {w} here. ", "This is about {N}. ",
        "I like {w}. ", "I am back from {N}. ", "{N} asked me. ", "It is {i} degrees here. ", "Hi, I am {N}. ", "I waited {i} days. ",
        "The {w} is broken. ", "I work for {N}. ", "We are {i} people. ", "Hi! ", "Hello. ", "Good morning. ", "One question: ",
        "I am new here. ", "It is about the {w}. ", "You know {N}. ", "Thanks for the {w}. ", "I have a {w} and a {w2}. ",
        "I live in {N}, near {N2}. ", "{N} and {N2} are here. ", "Sorry. ", "Quick one: ", "I only have {i} minutes. ",
        "You ought to know {N}. ", "I could not pick one. ", "Being {N}, I am in a hurry. ", "The {w} being broken, I ask you. ",
        "{N} ought to do this, but I am alone. ", "I ought to be in {N} by now. ", "They pick the {w} up later. ", "For the time being I am in {N}. ",
        "We pick our {w} with care. ", "I was being slow. ", "I take the bus. ", "It takes {i} minutes. ", "I am planning my day. ",
        "I am a bit tired. ", "My {w} arrives at {i}. ", "It has been a long day. ", "I'm with {N}. ", "Sorry to bother you. ",
    ),
    (),
    ("I am at home. ", "I just met {N}. ", "We have a {w}. ", "Good evening. ", "I am {N} from {N2}. "),
)  # fmt: skip


def aside(draw: Draw) -> str:
    """Returns a sentence to put before the request, or "" for none."""
    if not _ASIDES.of(draw.split) or not draw.chance(0.1 if draw.split == "train" else 0.06):
        return ""
    return draw.phrase(_ASIDES).format(
        N=draw.name(), N2=draw.name(), w=draw.word(), w2=draw.word(), i=draw.integer(2, 99)
    )
