"""Tools that clients often have, and sentences that ask for them naturally."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from training.corpus.base import Draw


@dataclass(frozen=True, slots=True)
class Parameter:
    names: tuple[str, ...]
    kind: str  # place, upper, text, integer
    about: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Known:
    names: tuple[str, ...]
    about: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    sentences: tuple[str, ...]
    option: tuple[str, tuple[str, ...]] | None = None  # an optional enum


def known_value(draw: Draw, kind: str) -> tuple[Any, str]:
    """(value, as a sentence has it)."""
    if kind == "integer":
        value = draw.integer(1, 300)
        return value, str(value)
    if kind == "text":
        text = " ".join(draw.words(draw.integer(1, 4)))
    elif kind == "upper":
        text = draw.word().upper()[:4]
    else:
        text = draw.name()
    return text, text


_PLACE = Parameter(
    ("city", "location", "place", "town"),
    "place",
    (
        "The {0} to look up",
        "The {0}",
        "City name",
        "The {0}, for example Lisbon",
        "City and country",
        "Name of the {0}",
    ),
)
KNOWN: tuple[Known, ...] = (
    Known(
        ("get_weather", "get_current_weather", "weather", "getWeather", "fetch_weather", "get_forecast"),
        ("Get the current weather in a given {0}", "Get the weather for a {0}.", "Current weather of a {0}",
         "Get current temperature for a given {0}.", "Returns the weather in a {0}", "Weather forecast", "Get the weather"),
        (_PLACE,),
        ("What is the weather in {0}?", "What's the weather like in {0}?", "How is the weather in {0} today?", "weather in {0}",
         "Tell me the weather in {0}.", "Is it raining in {0}?", "What is the weather like in {0} right now?",
         "What's the weather in {0}?", "What is the weather like in {0} today?", "How warm is it in {0}?",
         "Please get the weather for {0}.", "Will it rain in {0}?", "How's the weather in {0}?", "Check the weather in {0}."),
        ("unit", ("celsius", "fahrenheit")),
    ),
    Known(
        ("get_time", "current_time", "get_local_time", "get_current_time"),
        ("Get the current time in a {0}", "Current time of a {0}.", "Returns the local time in a {0}"),
        (Parameter(("city", "timezone", "place", "location"), "place", ("The {0}", "Where", "The {0} to look up")),),
        ("What time is it in {0}?", "Tell me the time in {0}.", "time in {0}", "What's the time in {0}?",
         "What is the time in {0}?", "Give me the current time in {0}.", "Which time is it in {0} now?", "Tell me what time it is in {0}."),
    ),
    Known(
        ("get_stock_price", "stock_price", "quote"),
        ("Get the price of a stock", "Current stock price by {0}", "Look up a stock quote"),
        (Parameter(("ticker", "symbol", "stock"), "upper", ("The {0}", "The {0} of the company")),),
        ("What is the stock price of {0}?", "Price of {0}?", "How is {0} trading?", "Get me a quote for {0}.",
         "What does a share of {0} cost?", "Stock price for {0}"),
    ),
    Known(
        ("send_email", "send_message", "sendMail"),
        ("Send a message to somebody", "Send an email", "Sends a message to a recipient."),
        (Parameter(("to", "recipient", "receiver"), "place", ("Who gets it", "The {0}")),
         Parameter(("text", "message", "body", "content"), "text", ("What it says", "The {0}"))),
        ("Send a message to {0} saying {1}", "Tell {0} that {1}", "Write to {0}: {1}", "Message {0}: {1}",
         "Send an email to {0} saying {1}", "Send {0} the text {1}"),
    ),
    Known(
        ("search", "web_search", "search_documents"),
        ("Search for a {0}", "Search the web", "Full text search over documents."),
        (Parameter(("query", "q", "term"), "text", ("What to search for", "The {0}")),),
        ("Search for {0}", "Look up {0}", "Find documents about {0}", "search {0}", "Search the web for {0}",
         "Please search for {0}"),
    ),
    Known(
        ("set_alarm", "set_timer", "start_timer"),
        ("Set a timer for some minutes", "Start a timer", "Sets a timer of so many {0}"),
        (Parameter(("minutes", "duration", "duration_minutes"), "integer", ("How many {0}", "Length in minutes")),),
        ("Set a timer for {0} minutes", "Wake me in {0} minutes", "Start a timer of {0} minutes", "timer {0} minutes",
         "Set an alarm in {0} minutes"),
    ),
    Known(
        ("book_table", "reserve_table"),
        ("Book a table at a restaurant", "Reserve a table"),
        (Parameter(("restaurant", "place", "venue"), "place", ("The {0}",)),
         Parameter(("guests", "people", "party_size"), "integer", ("How many people", "Number of {0}"))),
        ("Book a table at {0} for {1} people", "Reserve a table for {1} at {0}", "Table for {1} at {0} please",
         "Book a table for {1} at {0}.", "I want a table at {0} for {1}"),
    ),
    Known(
        ("convert_currency", "exchange"),
        ("Convert an amount between currencies", "Currency conversion"),
        (Parameter(("amount", "value"), "integer", ("How much", "The {0}")),
         Parameter(("from_currency", "source", "base"), "upper", ("From", "Currency to convert from")),
         Parameter(("to_currency", "target"), "upper", ("To", "Currency to convert to"))),
        ("Convert {0} {1} to {2}", "How much is {0} {1} in {2}?", "Exchange {0} {1} into {2}", "What is {0} {1} in {2}?",
         "{0} {1} in {2}?"),
    ),
    Known(
        ("get_flight", "find_flights", "search_flights"),
        ("Find flights between two cities", "Search for flights"),
        (Parameter(("origin", "from", "departure"), "place", ("Where it starts", "The {0}")),
         Parameter(("destination", "to", "arrival"), "place", ("Where it goes", "The {0}"))),
        ("Find flights from {0} to {1}", "I want to fly from {0} to {1}", "Flights from {0} to {1}?",
         "Find me a flight from {0} to {1}.", "Show me flights to {1} from {0}"),
    ),
    Known(
        ("calculate", "add_numbers", "add"),
        ("Add two numbers", "Adds two integers and returns the sum."),
        (Parameter(("a", "x", "first"), "integer", ("First number",)),
         Parameter(("b", "y", "second"), "integer", ("Second number",))),
        ("Use the tool to add {0} and {1}", "Add {0} and {1} with the tool", "Call the calculator with {0} and {1}",
         "Use the tool to compute {0} + {1}.", "Use your tool: {0} plus {1}"),
    ),
)  # fmt: skip
