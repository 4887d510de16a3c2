"""Common tools of clients, and natural requests for them.

Their names and parameters are seen in training; the sentences in ``held`` and the values are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from training.corpus.base import Draw, Phrases
from training.corpus.slots import text as sentence_like
from training.corpus.values import capitals, iso_date, mail, phrase, spoken_day, spoken_time
from training.corpus.wishes import wish


@dataclass(frozen=True, slots=True)
class Parameter:
    names: tuple[str, ...]
    kind: str  # see known_value
    about: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Known:
    names: tuple[str, ...]
    about: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    orders: Phrases  # imperatives in lower case; training.corpus.wishes turns them into requests
    questions: Phrases  # whole sentences
    option: tuple[str, tuple[str, ...]] | None = None  # an optional enum

    @property
    def group(self) -> str:
        """Returns the group of a tool. Tools of one group are easily confused, so a toolbox contains only one."""
        return _GROUPS.get(self.names[0], self.names[0])


_GROUPS = {
    "get_flight": "travel", "get_directions": "travel", "convert_currency": "convert", "convert_units": "convert",
    "set_alarm": "alarm", "alarm_at": "alarm", "add_reminder": "note", "create_event": "note", "add_task": "note",
    "send_email": "send", "compose_email": "send", "search": "find", "get_news": "find", "get_user": "find", "get_order": "find",
    "toggle_light": "light", "send_sms": "send", "create_invoice": "bill", "transfer_money": "bill", "reserve_restaurant": "book_table",
    "search_products": "find", "book_flight": "travel", "write_file": "file", "read_file": "file", "list_files": "file", "get_definition": "find",
}  # fmt: skip


def known_value(draw: Draw, kind: str) -> tuple[Any, str]:
    """Returns (value, its form in a sentence)."""
    if kind == "integer":
        value = draw.integer(1, draw.pick((30, 300, 300, 9999)))
        return value, str(value)
    if kind == "amount":
        amount = draw.integer(1, draw.pick((50, 500, 5000))) + draw.pick((0, 0, 0.5, 0.99, 0.25))
        return amount, f"{amount:g}" if draw.chance(0.7) else str(
            draw.pick(("${0}", "{0} dollars", "{0} EUR"))
        ).format(f"{amount:g}")
    if kind == "switch":
        is_on = draw.chance(0.5)
        return is_on, "on" if is_on else "off"
    if kind == "phone":
        number = (
            f"+{draw.integer(1, 99)}{draw.integer(10**6, 10**10)}"
            if draw.chance(0.6)
            else f"555-{draw.integer(100, 9999)}"
        )
        return number, number
    if kind == "path":
        path = "/".join(draw.words(draw.integer(1, 3))) + draw.pick(
            (".py", ".txt", ".md", ".json", ".csv", "", ".log")
        )
        path = draw.pick(("", "", "/", "./", "src/", "~/")) + path
        return path, path if draw.chance(0.8) else f"`{path}`"
    if kind == "text":
        text = " ".join(draw.words(draw.integer(1, 5)))
        text = text.capitalize() if draw.chance(0.2) else text
        if draw.split == "train" and draw.chance(0.3):
            text = sentence_like(draw)
        if draw.split == "train" and draw.chance(0.25):
            return text, draw.pick(('"{0}"', "'{0}'", '"{0}"')).format(text)
    elif kind == "upper":
        text = capitals(draw, 2, 4)
    elif kind == "who":
        text = mail(draw) if draw.chance(0.25) else draw.name()
    elif kind == "day":
        text = iso_date(draw) if draw.chance(0.3) else spoken_day(draw)
    elif kind == "time":
        text = spoken_time(draw)
    elif kind == "word":
        text = " ".join(draw.words(2)) if draw.split == "train" and draw.chance(0.3) else draw.word()
    elif kind == "thing":
        text = phrase(draw)
    elif kind == "place" and draw.chance(0.12):
        text = f"{draw.name()}, {draw.pick((draw.name(), capitals(draw, 2, 2)))}"
    else:
        text = draw.name()
    return text, text


def known_request(draw: Draw, kind: Known, spoken: list[str]) -> str:
    """Returns a sentence that states all values of a tool, in the order of its parameters."""
    orders, questions = kind.orders.of(draw.split), kind.questions.of(draw.split)
    if orders and (not questions or draw.chance(0.5)):
        sentence = wish(draw, str(draw.pick(orders)))
        sentence += draw.pick(
            (".", "", "?" if sentence.lower().startswith(("can", "could", "would", "will")) else ".")
        )
    else:
        sentence = str(draw.pick(questions))
    return sentence.format(*spoken)


_PLACE = Parameter(
    ("city", "location", "place", "town"),
    "place",
    (
        "The {0} to look up", "The {0}", "City name", "The {0}, for example Lisbon", "City and country", "Name of the {0}",
        "The city and state, e.g. San Francisco, CA", "City and country e.g. Bogotá, Colombia",
    ),
)  # fmt: skip
KNOWN: tuple[Known, ...] = (
    Known(
        ("get_weather", "get_current_weather", "weather", "getWeather", "fetch_weather", "get_forecast"),
        ("Get the current weather in a given {0}", "Get the weather for a {0}.", "Current weather of a {0}", "Weather of a city",
         "Get current temperature for a given {0}.", "Returns the weather in a {0}", "Weather forecast", "Get the weather"),
        (_PLACE,),
        Phrases(
            ("tell me the weather in {0}", "get the weather for {0}", "look up the weather in {0}", "show me the weather in {0}",
             "find out how warm it is in {0}", "get the forecast for {0}", "tell me if it rains in {0}", "find the weather of {0}",
             "know the weather in {0}", "see the temperature in {0}"),
            (),
            ("check the weather in {0}", "find out the weather in {0}"),
        ),
        Phrases(
            ("What is the weather in {0}?", "What's the weather like in {0}?", "How is the weather in {0} today?", "weather in {0}",
             "Is it raining in {0}?", "What is the weather like in {0} right now?", "What's the weather in {0}?", "weather {0}",
             "What is the weather like in {0} today?", "How warm is it in {0}?", "Is it cold in {0}?", "Do I need an umbrella in {0}?",
             "What is the temperature in {0}?", "Is the sun shining in {0}?", "What about the weather in {0}?", "{0} weather",
             "How cold is it in {0} today?", "Is it sunny in {0}?", "Does it snow in {0}?", "I travel to {0}. How is the weather there?",
             "What will the weather be in {0} tomorrow?", "How hot is it in {0} right now?", "I am in {0}. Do I need a coat?",
             "What's the forecast for {0}?", "What is the weather in {0} like?", "Weather for {0} please", "How is the weather over in {0}?",
             "What's the temperature in {0}?", "In {0}, how is the weather?", "What sort of weather do they have in {0}?", "What's the weather in {0} right now?", "Could you tell me what the weather is in {0}?",
             "Tell me about the weather in {0}.", "Give me the weather report for {0}.", "Weather report for {0}", "What's the weather going to be in {0}?",
             "Is it windy in {0}?", "How humid is it in {0}?", "Should I take a jacket in {0}?", "Can you check if it is hot in {0}?",
             "What's the current weather in {0}?", "Current weather in {0}", "current conditions in {0}?", "What are the conditions in {0} now?",
             "Today's weather in {0}", "How's it looking in {0}, weather-wise?", "I fly to {0} tomorrow, what is the weather there?",
             "Planning a trip to {0}, how is the weather?", "What does the forecast say for {0}?", "Forecast {0}", "Any rain in {0} today?",
             "Is there snow in {0} now?", "Is it nice in {0}?", "How many degrees is it in {0}?", "What's the weather today in {0}?",
             "Tell me today's temperature in {0}", "Hi, what's the weather in {0}?", "hey, how's the weather looking in {0}"),
            ("How's the weather in {0}?", "Check the weather in {0}."),
            ("Will it rain in {0}?", "Is it warm in {0} today?", "What's it like outside in {0}?"),
        ),
        ("unit", ("celsius", "fahrenheit")),
    ),
    Known(
        ("get_time", "current_time", "get_local_time", "get_current_time"),
        ("Get the current time in a {0}", "Current time of a {0}.", "Returns the local time in a {0}"),
        (Parameter(("city", "timezone", "place", "location"), "place", ("The {0}", "Where", "The {0} to look up")),),
        Phrases(
            ("tell me the time in {0}", "give me the current time in {0}", "look up the time in {0}", "get the time for {0}",
             "find out the time in {0}", "show the local time of {0}", "know the time in {0}"),
            (),
            ("tell me what time it is in {0}", "check the time in {0}"),
        ),
        Phrases(
            ("What time is it in {0}?", "time in {0}", "What's the time in {0}?", "What is the time in {0}?", "{0} time",
             "Which time is it in {0} now?", "How late is it in {0}?", "What is the local time of {0}?", "What time do they have in {0}?",
             "What time is it now in {0}?", "Time for {0}?", "In {0}, what is the time?", "What hour is it in {0}?",
             "Is it late in {0}?", "What does the clock say in {0}?", "I am in {0}. What time is it?", "What time is it right now in {0}?", "Do you know the time in {0}?", "Tell me the time in {0}", "Local time in {0}?",
             "Is it morning in {0}?", "Could you tell me the local time in {0}?", "Current time {0}"),
            ("Tell me what time it is in {0}.",),
            ("What time is it over in {0}?", "What is the current time in {0}?"),
        ),
    ),
    Known(
        ("get_stock_price", "stock_price", "quote"),
        ("Get the price of a stock", "Current stock price by {0}", "Look up a stock quote"),
        (Parameter(("ticker", "symbol", "stock"), "upper", ("The {0}", "The {0} of the company")),),
        Phrases(
            ("get me a quote for {0}", "look up the stock price of {0}", "show me the stock {0}", "find the price of {0}",
             "tell me the share price of {0}", "check {0} on the stock market", "get the stock {0}"),
            (),
            ("check the stock price of {0}", "quote {0}"),
        ),
        Phrases(
            ("What is the stock price of {0}?", "Price of {0}?", "How is {0} trading?", "What does a share of {0} cost?", "{0} stock price",
             "How much is {0} stock?", "What is {0} worth?", "How high is {0} today?", "How is the stock {0} doing?", "{0} stock?",
             "What's the price of {0}?", "What is the price of {0} shares?", "The share price of {0}?", "Stock {0}", "Quote for {0}", "What is {0} stock at right now?", "Current price of {0}", "Can you look up {0}'s stock price?", "Where does {0} stand today?",
             "What is the current stock price of {0}?", "How much does one {0} share cost?", "Did {0} go up today?"),
            ("Stock price for {0}",),
            ("What's {0} trading at?", "How much is one share of {0}?"),
        ),
    ),
    Known(
        ("send_email", "send_message", "sendMail"),
        ("Send a message to somebody", "Send an email", "Sends a message to a recipient."),
        (Parameter(("to", "recipient", "receiver"), "who", ("Who gets it", "The {0}")),
         Parameter(("text", "message", "body", "content"), "text", ("What it says", "The {0}"))),
        Phrases(
            ("send a message to {0} saying {1}", "tell {0} that {1}", "write to {0}: {1}", "message {0}: {1}", "let {0} know: {1}",
             "send {1} to {0}", "send \"{1}\" to {0}", "mail {0}: {1}", "write {0} an email saying {1}", "send {0} a message: {1}",
             "send {0} an email that says {1}", "inform {0} that {1}", "text {0}: {1}", "write an email to {0} with the text {1}",
             "send {0} the words {1}", "send {0} the message {1}", "send an email with {1} to {0}", "drop {0} a line: {1}",
             "send the message {1} to {0}", "email {0} saying {1}", "send a mail to {0}: {1}", "forward {1} to {0}",
             "write {1} to {0}", "give {0} the message {1}", "send {0} this: {1}", "tell {0}: {1}", "mail {1} to {0}"),
            (),
            ("send {0} the text {1}", "email {0}: {1}", "send an email to {0} that says {1}"),
        ),
        Phrases(
            ("Tell {0} that {1}", "{0} must know that {1}", "{0} should read: {1}", "A message for {0}: {1}", "Email to {0}: {1}",
             "For {0}: {1}", "{0} wants to hear {1}", "New mail to {0}: {1}"),
            ("Send {0} the text {1}",),
            ("Send an email to {0} saying {1}", "Message to {0}: {1}"),
        ),
    ),
    Known(
        ("compose_email", "send_mail", "email", "draft_email"),
        ("Send an email with a subject", "Compose an email"),
        (Parameter(("to", "recipient", "address"), "who", ("Who gets it", "The {0}")),
         Parameter(("subject", "title"), "text", ("The {0}",)),
         Parameter(("body", "text", "content", "message"), "text", ("What it says", "The {0}"))),
        Phrases(
            ("send an email to {0} with subject {1} and body {2}", "send {0} an email with the subject {1} and the text {2}",
             "write to {0}, subject {1}: {2}", "send a mail to {0} about {1} saying {2}", "write an email to {0} with the subject {1}: {2}",
             "mail {0} under the subject {1}: {2}", "send {2} to {0} with the subject {1}", "email {0}, subject {1}, text {2}",
             "write {2} to {0}, the subject is {1}", "send an email with subject {1} to {0}: {2}"),
            (),
            ("send a mail to {0} with the subject {1} that says {2}", "email {0} with subject {1} and text {2}"),
        ),
        Phrases(
            ("To: {0}. Subject: {1}. {2}", "An email to {0}, subject {1}, saying {2}", "{0} should get a mail with subject {1}: {2}"),
            (),
            ("Email to {0}, subject: {1}, body: {2}", "Mail for {0} with subject {1}: {2}"),
        ),
    ),
    Known(
        ("search", "web_search", "search_documents"),
        ("Search for a {0}", "Search the web", "Full text search over documents."),
        (Parameter(("query", "q", "term"), "text", ("What to search for", "The {0}")),),
        Phrases(
            ("look up {0}", "find documents about {0}", "search {0}", "search the web for {0}", "find {0}", "search online for {0}",
             "google {0}", "find pages on {0}", "look for {0}", "do a search for {0}", "find me something on {0}", "search \"{0}\""),
            (),
            ("search for {0}", "search the documents for {0}", "run a search for {0}"),
        ),
        Phrases(
            ("Search for {0}", "Search: {0}", "search {0}", "What do you find about {0}?", "Is there anything about {0}?", "What can you find on {0}?",
             "Find: {0}", "Look: {0}", "Any documents on {0}?", "Results for {0}?"),
            ("Please search for {0}",),
            ("What does the web say about {0}?",),
        ),
    ),
    Known(
        ("set_alarm", "set_timer", "start_timer"),
        ("Set a timer for some minutes", "Start a timer", "Sets a timer of so many {0}", "Set an alarm"),
        (Parameter(("minutes", "duration", "duration_minutes"), "integer", ("How many {0}", "Length in minutes")),),
        Phrases(
            ("set a timer for {0} minutes", "wake me in {0} minutes", "start a timer of {0} minutes", "set the alarm for {0} minutes",
             "ring in {0} minutes", "set an alarm for {0} minutes from now", "set a {0} minute timer", "start a {0}-minute timer",
             "remind me in {0} minutes", "let the alarm ring in {0} minutes", "count down {0} minutes", "set the clock to {0} minutes",
             "time {0} minutes", "call me in {0} minutes", "make an alarm of {0} minutes", "beep after {0} minutes",
             "set a new alarm, {0} minutes", "stop me after {0} minutes"),
            (),
            ("set an alarm in {0} minutes", "wake me up in {0} minutes"),
        ),
        Phrases(
            ("timer {0} minutes", "{0} minutes, please.", "Timer: {0} minutes", "alarm {0} minutes", "Alarm in {0} minutes, please.",
             "I want to sleep for {0} minutes.", "Timer for {0} min", "A timer of {0} minutes, please", "{0} minute timer",
             "In {0} minutes I have to get up.", "My eggs need {0} minutes."),
            ("Set an alarm in {0} minutes",),
            ("Timer of {0} minutes please", "I need an alarm in {0} minutes."),
        ),
    ),
    Known(
        ("alarm_at", "create_alarm", "set_wake_up"),
        ("Set an alarm at a time", "Wake the user at a {0}"),
        (Parameter(("time", "at", "wake_time", "alarm_time"), "time", ("When it rings", "The {0}", "Time of day")),),
        Phrases(
            ("set an alarm for {0}", "wake me at {0}", "set the alarm to {0}", "ring at {0}", "create an alarm for {0}",
             "let the alarm ring at {0}", "set my alarm at {0}", "make an alarm for {0}"),
            (),
            ("wake me up at {0}", "put an alarm at {0}"),
        ),
        Phrases(
            ("Alarm at {0}", "alarm for {0} please", "I have to get up at {0}.", "I want to be up at {0}.", "Alarm: {0}", "{0} alarm"),
            (),
            ("I need an alarm at {0}.", "An alarm for {0}, please."),
        ),
    ),
    Known(
        ("book_table", "reserve_table"),
        ("Book a table at a restaurant", "Reserve a table"),
        (Parameter(("restaurant", "place", "venue"), "name", ("The {0}",)),
         Parameter(("guests", "people", "party_size"), "integer", ("How many people", "Number of {0}"))),
        Phrases(
            ("book a table at {0} for {1} people", "reserve a table for {1} at {0}", "book a table for {1} at {0}", "get us a table at {0}, {1} people",
             "find a table for {1} people at {0}", "reserve {1} seats at {0}", "book {0} for {1} people", "reserve at {0} for {1}",
             "book {1} seats at {0}", "make a reservation at {0} for {1}", "make a reservation for {1} at {0}"),
            (),
            ("reserve a table at {0} for {1} guests", "book us a table for {1} in {0}"),
        ),
        Phrases(
            ("Table for {1} at {0} please", "A table for {1} at {0}, please", "We are {1} and want to eat at {0}.", "A table at {0}, {1} people",
             "{1} people at {0}, please.", "Dinner at {0} for {1}", "Is there a table for {1} at {0}?", "{0}, table for {1}"),
            ("I want a table at {0} for {1}",),
            ("We are {1} people and need a table at {0}.", "Lunch for {1} at {0}"),
        ),
    ),
    Known(
        ("convert_currency", "exchange"),
        ("Convert an amount between currencies", "Currency conversion"),
        (Parameter(("amount", "value"), "integer", ("How much", "The {0}")),
         Parameter(("from_currency", "source", "base"), "upper", ("From", "Currency to convert from")),
         Parameter(("to_currency", "target"), "upper", ("To", "Currency to convert to"))),
        Phrases(
            ("convert {0} {1} to {2}", "exchange {0} {1} into {2}", "change {0} {1} into {2}", "turn {0} {1} into {2}",
             "swap {0} {1} for {2}", "calculate {0} {1} in {2}", "tell me how much {0} {1} are in {2}", "give me {0} {1} in {2}"),
            (),
            ("exchange {0} {1} for {2}", "convert {0} {1} into {2}"),
        ),
        Phrases(
            ("How much is {0} {1} in {2}?", "What is {0} {1} in {2}?", "How many {2} do I get for {0} {1}?", "{0} {1} to {2}",
             "What are {0} {1} in {2}?", "How many {2} are {0} {1}?", "{0} {1} = ? {2}", "I have {0} {1}. How much is that in {2}?",
             "I need {0} {1} in {2}.", "{0} {1} into {2}, please", "What do I get in {2} for {0} {1}?"),
            ("{0} {1} in {2}?",),
            ("How much are {0} {1} in {2}?",),
        ),
    ),
    Known(
        ("convert_units", "unit_converter", "convert"),
        ("Convert a value from one unit to another", "Unit conversion"),
        (Parameter(("value", "amount", "number"), "integer", ("The {0}", "What to convert")),
         Parameter(("from_unit", "source_unit", "from"), "word", ("Unit to convert from",)),
         Parameter(("to_unit", "target_unit", "to"), "word", ("Unit to convert to",))),
        Phrases(
            ("convert {0} {1} to {2}", "turn {0} {1} into {2}", "express {0} {1} in {2}", "calculate {0} {1} in {2}", "change {0} {1} to {2}"),
            (),
            ("convert {0} {1} into {2}", "show {0} {1} in {2}"),
        ),
        Phrases(
            ("How many {2} are {0} {1}?", "What is {0} {1} in {2}?", "How much is {0} {1} in {2}?", "{0} {1} to {2}",
             "How many {2} are there in {0} {1}?", "How long is {0} {1} in {2}?"),
            (),
            ("{0} {1} in {2}?", "What are {0} {1} in {2}?"),
        ),
    ),
    Known(
        ("get_flight", "find_flights", "search_flights"),
        ("Find flights between two cities", "Search for flights"),
        (Parameter(("origin", "from", "departure"), "name", ("Where it starts", "The {0}")),
         Parameter(("destination", "to", "arrival"), "name", ("Where it goes", "The {0}"))),
        Phrases(
            ("find flights from {0} to {1}", "fly from {0} to {1}", "find me a flight from {0} to {1}", "book a flight to {1} from {0}",
             "get from {0} to {1}", "look for flights to {1} starting in {0}", "search flights {0} to {1}", "fly to {1} from {0}",
             "travel to {1} from {0}", "find a plane to {1} that leaves from {0}", "list flights from {0} to {1}", "leave {0} for {1}",
             "get me to {1} from {0}", "find flights to {1}, leaving from {0}", "leave {0} and fly to {1}", "list planes to {1} from {0}"),
            (),
            ("show me flights to {1} from {0}", "find a flight to {1} from {0}", "search for flights from {0} to {1}"),
        ),
        Phrases(
            ("Flights from {0} to {1}?", "I want to fly from {0} to {1}", "flights {0} - {1}", "How do I fly from {0} to {1}?",
             "Is there a flight to {1} from {0}?", "From {0} to {1}", "I am in {0} and must get to {1}.", "Which flights go to {1} from {0}?",
             "Are there flights to {1} from {0}?", "I need to be in {1}. I start in {0}.", "{0} to {1} by plane", "A flight to {1} from {0}, please.",
             "Which planes fly from {0} to {1}?", "I live in {0} and want to visit {1}.", "To {1} from {0}"),
            ("Show me flights to {1} from {0}",),
            ("Are there any flights from {0} to {1}?", "I want to go to {1} from {0}"),
        ),
    ),
    Known(
        ("calculate", "add_numbers", "add"),
        ("Add two numbers", "Adds two integers and returns the sum."),
        (Parameter(("a", "x", "first"), "integer", ("First number",)),
         Parameter(("b", "y", "second"), "integer", ("Second number",))),
        Phrases(
            ("use the tool to add {0} and {1}", "add {0} and {1} with the tool", "call the calculator with {0} and {1}",
             "use the tool for {0} + {1}", "let the tool add {0} and {1}", "take the tool for {0} plus {1}", "use a tool for {0} + {1}",
             "add {0} and {1} with the calculator", "have the tool add {0} to {1}", "compute {0} + {1} with your tool",
             "use your calculator for {0} plus {1}", "call your tool with {0} and {1}", "use your calculator: {0} and {1}"),
            (),
            ("use your tool to add {0} and {1}", "use the calculator: {0} + {1}"),
        ),
        Phrases(
            ("Use the tool to compute {0} + {1}.", "With the tool: {0} + {1}", "Tool please: {0} + {1}", "Use the calculator. {0} plus {1}",
             "Not in your head, with the tool: {0} + {1}", "Use a tool: {0} plus {1}", "Your tool can add: {0} and {1}",
             "What does the tool say: {0} + {1}?", "Use the tools: {0} plus {1}", "With your tool: {0} plus {1}",
             "Your calculator, please: {0} plus {1}", "Call your tool: {0} + {1}"),
            ("Use your tool: {0} plus {1}",),
            ("What is {0} + {1}? Use the tool.",),
        ),
    ),
    Known(
        ("translate", "translate_text", "get_translation"),
        ("Translate a text", "Translates text into another language"),
        (Parameter(("text", "phrase", "content", "sentence"), "text", ("What to translate", "The {0}")),
         Parameter(("language", "target_language", "to"), "name", ("The language to translate to", "The {0}"))),
        Phrases(
            ("translate {0} into {1}", "translate {0} to {1}", "translate \"{0}\" to {1}", "say {0} in {1}", "put {0} into {1}",
             "translate into {1}: {0}", "turn {0} into {1}", "give me {0} in {1}", "translate the text {0} into {1}",
             "write \"{0}\" in {1}", "translate '{0}' into {1}", "translate '{0}' to {1}"),
            (),
            ("translate \"{0}\" into {1}", "translate the words {0} to {1}"),
        ),
        Phrases(
            ("What is {0} in {1}?", "How do you say {0} in {1}?", "{0} in {1}?", "What does {0} mean in {1}?", "{0}, in {1} please",
             "How do I say \"{0}\" in {1}?", "To {1}: {0}", "What's \"{0}\" in {1}?", "What is '{0}' in {1}?"),
            (),
            ("How would you say {0} in {1}?", "What's {0} in {1}?"),
        ),
    ),
    Known(
        ("create_event", "add_to_calendar", "schedule_meeting"),
        ("Create a calendar event", "Put something into the calendar", "Schedule a meeting"),
        (Parameter(("title", "event", "name"), "thing", ("What it is", "The {0}")),
         Parameter(("date", "day", "when"), "day", ("The {0}", "When it is"))),
        Phrases(
            ("put {0} into my calendar on {1}", "create an event {0} on {1}", "schedule {0} for {1}", "add {0} to the calendar for {1}",
             "plan {0} on {1}", "enter {0} on {1}", "make an event called {0} on {1}", "schedule a meeting called {0} for {1}",
             "set up {0} for {1}", "note {0} for {1}"),
            (),
            ("schedule an event {0} on {1}", "add an event called {0} for {1}"),
        ),
        Phrases(
            ("On {1} we have {0}.", "{0} is on {1}, put it down.", "New event: {0}, {1}", "Calendar: {0} on {1}", "{1}: {0}", "Meeting {0} on {1}"),
            (),
            ("There is {0} on {1}, add it.", "New meeting: {0} on {1}"),
        ),
    ),
    Known(
        ("add_reminder", "create_reminder", "remind"),
        ("Remind the user of something", "Create a reminder"),
        (Parameter(("text", "task", "what", "note"), "text", ("What to remember", "The {0}")),
         Parameter(("time", "when", "at"), "time", ("When", "The {0}"))),
        Phrases(
            ("remind me of {0} at {1}", "remind me to {0} at {1}", "set a reminder for {1}: {0}", "remind me at {1} of {0}",
             "make a reminder at {1}: {0}", "add a reminder {0} at {1}", "tell me at {1} to {0}", "set a reminder to {0} at {1}"),
            (),
            ("remind me at {1} to {0}", "create a reminder for {0} at {1}"),
        ),
        Phrases(
            ("Reminder at {1}: {0}", "I must not forget {0} at {1}.", "{1}: {0}, remind me.", "At {1} I want to {0}, remind me."),
            (),
            ("Reminder for {1}: {0}", "At {1} I have to {0}."),
        ),
    ),
    Known(
        ("play_music", "play_song", "play"),
        ("Play a song", "Plays music by an artist", "Start some music"),
        (Parameter(("artist", "song", "title", "query"), "thing", ("What to play", "The {0}")),),
        Phrases(
            ("play {0}", "play the song {0}", "play something by {0}", "put on {0}", "start {0}", "play me {0}", "play music by {0}", "hear {0}"),
            (),
            ("play some {0}", "listen to {0}"),
        ),
        Phrases(
            ("I want to hear {0}.", "Music: {0}", "Some {0}, please.", "Now {0}!", "The song {0}, please."),
            (),
            ("Could I hear {0}?", "A song by {0}, please."),
        ),
    ),
    Known(
        ("set_temperature", "heat", "set_thermostat"),
        ("Set the temperature of a room", "Control the thermostat"),
        (Parameter(("room", "zone", "where"), "word", ("The {0}", "Which {0}")),
         Parameter(("degrees", "temperature", "target"), "integer", ("How warm", "The {0}"))),
        Phrases(
            ("set the {0} to {1} degrees", "heat the {0} to {1}", "make the {0} {1} degrees", "bring the {0} to {1} degrees",
             "set the temperature in the {0} to {1}", "turn the {0} to {1} degrees", "warm the {0} up to {1} degrees"),
            (),
            ("set the temperature of the {0} to {1}", "keep the {0} at {1} degrees"),
        ),
        Phrases(
            ("{1} degrees in the {0}, please", "The {0} should have {1} degrees.", "I want {1} degrees in the {0}.", "{0}: {1} degrees"),
            (),
            ("It should be {1} degrees in the {0}.", "The {0} needs {1} degrees."),
        ),
    ),
    Known(
        ("get_order", "order_status", "track_order", "lookup_order"),
        ("Look up an order", "Get the status of an order by its number", "Track an order"),
        (Parameter(("order_id", "order", "number", "id"), "integer", ("The {0}", "Number of the order")),),
        Phrases(
            ("look up order {0}", "track order {0}", "find my order {0}", "tell me the status of order {0}", "show order {0}",
             "check on order number {0}", "find out where order {0} is"),
            (),
            ("check order {0}", "get the status of order {0}"),
        ),
        Phrases(
            ("Where is my order {0}?", "What is the status of order {0}?", "order {0}", "Did order {0} ship?", "Order number {0}?",
             "When does order {0} come?", "I wait for order {0}.", "My order is number {0}. Where is it?"),
            (),
            ("Has order {0} arrived?", "What happened to order {0}?"),
        ),
    ),
    Known(
        ("get_user", "find_person", "lookup_contact", "find_customer"),
        ("Find a person by {0}", "Look up a contact", "Returns the record of a customer"),
        (Parameter(("name", "person", "customer", "user"), "who", ("The {0}", "Who")),),
        Phrases(
            ("look up {0}", "find {0}", "find the record of {0}", "show me the contact {0}", "get the data of {0}", "open the file of {0}",
             "find the customer {0}", "look for the person {0}"),
            (),
            ("find the contact {0}", "get the record for {0}"),
        ),
        Phrases(
            ("Who is {0} in our records?", "Do we know {0}?", "Contact data of {0}?", "Is {0} a customer?", "What do we have on {0}?",
             "The record of {0}, please"),
            (),
            ("Is there a record of {0}?", "Do we have {0} in the system?"),
        ),
    ),
    Known(
        ("get_directions", "route", "navigate"),
        ("Get directions between two places", "Plan a route"),
        (Parameter(("start", "from", "origin"), "name", ("Where it starts", "The {0}")),
         Parameter(("end", "to", "destination"), "name", ("Where it ends", "The {0}"))),
        Phrases(
            ("show me the way from {0} to {1}", "navigate from {0} to {1}", "find a route from {0} to {1}", "drive to {1} from {0}",
             "walk from {0} to {1}", "plan the way to {1}, starting in {0}", "guide me to {1} from {0}"),
            (),
            ("get directions from {0} to {1}", "find the way to {1} from {0}"),
        ),
        Phrases(
            ("How do I get from {0} to {1}?", "Directions from {0} to {1}", "How far is it from {0} to {1}?", "What is the way to {1} from {0}?",
             "I am in {0}. How do I reach {1}?", "Route {0} to {1}"),
            (),
            ("How can I get to {1} from {0}?", "Which way is it from {0} to {1}?"),
        ),
    ),
    Known(
        ("add_task", "create_todo", "add_todo", "create_ticket"),
        ("Add a task to the list", "Create a todo", "Create a ticket"),
        (Parameter(("title", "task", "text", "description"), "text", ("What is to be done", "The {0}")),),
        Phrases(
            ("add {0} to my list", "add the task {0}", "put {0} on my list", "create a task: {0}", "note that I have to {0}",
             "make a ticket: {0}", "open a ticket {0}", "write {0} on the list"),
            (),
            ("add a task: {0}", "create a ticket for {0}"),
        ),
        Phrases(
            ("New task: {0}", "todo: {0}", "I still have to {0}.", "On my list: {0}", "Task {0}"),
            (),
            ("New ticket: {0}", "Another task: {0}"),
        ),
    ),
    Known(
        ("get_news", "news", "latest_news"),
        ("Get news about a {0}", "Latest headlines"),
        (Parameter(("topic", "subject", "about"), "thing", ("The {0}", "What the news are about")),),
        Phrases(
            ("get me the news about {0}", "show news on {0}", "find headlines about {0}", "read me the news about {0}", "find the latest on {0}"),
            (),
            ("tell me the news about {0}", "get the latest news on {0}"),
        ),
        Phrases(
            ("What is new about {0}?", "news {0}", "Any news on {0}?", "What is in the news about {0}?", "Headlines about {0}?", "News about {0}"),
            (),
            ("Is there any news about {0}?", "What's the latest on {0}?"),
        ),
    ),
    Known(
        ("roll_dice", "random_number", "draw_number"),
        ("Roll a die with so many {0}", "Draw a random number"),
        (Parameter(("sides", "max", "limit"), "integer", ("How many", "The largest number")),),
        Phrases(
            ("roll a die with {0} sides", "roll a {0}-sided die", "draw a number up to {0}", "pick a random number up to {0}",
             "throw a die of {0}", "give me a random number below {0}"),
            (),
            ("roll the dice with {0} sides", "choose a random number up to {0}"),
        ),
        Phrases(
            ("A random number up to {0}, please.", "Random: {0}", "A die with {0} sides!", "Which number comes, up to {0}?"),
            (),
            ("Dice with {0} sides please", "A random number between 1 and {0}."),
        ),
    ),
    Known(
        ("toggle_light", "set_light", "control_light", "switch_light", "light_switch"),
        ("Turn a light on or off", "Switch the light of a {0}", "Controls the smart lights"),
        (Parameter(("room", "location", "zone", "light"), "word", ("The {0}", "Which {0}")),
         Parameter(("on", "state", "is_on", "turn_on"), "switch", ("True for on", "Whether it is on"))),
        Phrases(
            ("turn {1} the light in the {0}", "turn {1} the {0} light", "switch {1} the lights in the {0}", "turn the {0} light {1}", "switch the light in the {0} {1}",
             "turn the lights in the {0} {1}", "switch {1} the {0} lamp", "put the {0} light {1}"),
        ),
        Phrases(("{0} light {1}", "Lights {1} in the {0}", "The {0} light should be {1}.", "Light {1} in the {0}, please")),
    ),
    Known(
        ("send_sms", "text_message", "sms", "send_text"),
        ("Send a text message to a phone", "Sends an SMS"),
        (Parameter(("phone_number", "number", "to", "phone"), "phone", ("The {0}", "Number with country code")),
         Parameter(("message", "text", "body"), "text", ("What it says", "The {0}"))),
        Phrases(
            ("text {0} that {1}", "text {0}: {1}", "send an sms to {0}: {1}", "send a text to {0} saying {1}", "text {1} to {0}", "tell {0} that {1}", "sms {0} with {1}",
             "write to {0} that {1}"),
        ),
        Phrases(("SMS to {0}: {1}", "Text {0} saying {1}", "A text for {0}: {1}")),
    ),
    Known(
        ("create_invoice", "new_invoice", "bill_customer"),
        ("Create an invoice for a customer", "Bill somebody"),
        (Parameter(("customer_name", "customer", "client"), "name", ("The {0}", "Who pays")),
         Parameter(("amount", "total", "price"), "amount", ("The {0}", "How much, in dollars"))),
        Phrases(
            ("create an invoice for {0} over {1}", "bill {0} {1}", "invoice {0} for {1}", "charge {0} {1}", "make an invoice of {1} for {0}", "send {0} a bill over {1}",
             "bill {1} to {0}", "write {0} an invoice for {1}"),
        ),
        Phrases(("{0} owes us {1}, write an invoice.", "Invoice for {0}: {1}", "New bill: {0}, {1}")),
    ),
    Known(
        ("transfer_money", "send_money", "pay"),
        ("Transfer money to somebody", "Pay an amount"),
        (Parameter(("recipient", "to", "receiver"), "name", ("Who gets it",)), Parameter(("amount", "sum"), "amount", ("How much",))),
        Phrases(("send {1} to {0}", "transfer {1} to {0}", "pay {0} {1}", "wire {0} {1}", "give {0} {1}", "send {0} {1}")),
        Phrases(("{0} gets {1} from me.", "Transfer to {0}: {1}", "I owe {0} {1}, pay it.")),
    ),
    Known(
        ("reserve_restaurant", "book_restaurant", "make_reservation"),
        ("Reserve a table at a restaurant", "Book a restaurant at a time"),
        (Parameter(("restaurant", "name", "venue"), "name", ("Name of the restaurant",)), Parameter(("party_size", "people", "guests"), "integer", ("How many",)),
         Parameter(("time", "at", "when"), "time", ("When", "Time of day"))),
        Phrases(
            ("book a table for {1} at {0} at {2}", "reserve a table at {0} for {1} at {2}", "get us a table for {1} at {0} for {2}", "book {0} for {1} people at {2}",
             "make a reservation at {0} at {2} for {1}", "reserve {0} at {2} for {1} people", "book a table at {2} for {1} at {0}"),
        ),
        Phrases(("Table for {1} at {0}, {2}", "Dinner at {0} at {2}, we are {1}.", "{2}, {0}, {1} people", "We want to eat at {0} at {2}, {1} of us.")),
    ),
    Known(
        ("search_products", "find_products", "product_search", "search_items"),
        ("Search the product catalogue", "Find products up to a price"),
        (Parameter(("query", "product", "keywords"), "text", ("What to look for", "Search terms")),
         Parameter(("max_price", "price_limit", "budget"), "amount", ("Highest price", "The {0}"))),
        Phrases(
            ("find me {0} under {1}", "show me {0} for less than {1}", "search for {0} below {1}", "look for {0} up to {1}", "find {0} cheaper than {1}", "buy {0} for at most {1}"),
        ),
        Phrases(("{0} under {1}", "I need {0} below {1}.", "Do you have {0} for under {1}?", "Is there {0} for less than {1}?", "I'm looking for {0}, at most {1}")),
    ),
    Known(
        ("book_hotel", "find_hotel", "search_hotels"),
        ("Find a hotel in a city", "Book a hotel room"),
        (Parameter(("city", "location", "place"), "place", ("The {0}",)), Parameter(("check_in", "date", "arrival_date"), "day", ("First day", "Date of arrival")),
         Parameter(("nights", "num_nights"), "integer", ("How many nights",))),
        Phrases(("book a hotel in {0} from {1} for {2} nights", "find a hotel in {0} for {2} nights from {1}", "reserve a room in {0} on {1} for {2} nights",
                 "get me a room in {0}, {2} nights, from {1}")),
        Phrases(("Hotel in {0}, {1}, {2} nights", "I need a room in {0} from {1}, {2} nights.", "{2} nights in {0} starting {1}")),
    ),
    Known(
        ("book_flight", "reserve_flight", "flight_search", "find_flight_on"),
        ("Search flights between two airports on a date", "Book a flight"),
        (Parameter(("origin", "from_city", "departure_city"), "name", ("Origin", "City of departure")), Parameter(("destination", "to_city", "arrival_city"), "name", ("Destination",)),
         Parameter(("date", "departure_date", "travel_date"), "day", ("Travel date", "Day of the flight"))),
        Phrases(
            ("find flights from {0} to {1} on {2}", "book a flight from {0} to {1} on {2}", "fly to {1} from {0} on {2}", "get me from {0} to {1} on {2}",
             "search flights to {1} from {0} for {2}", "book me {0} to {1} for {2}"),
        ),
        Phrases(("Flights from {0} to {1} on {2}?", "{0} to {1} on {2}", "On {2} I fly from {0} to {1}.", "I must be in {1} on {2}, coming from {0}.")),
    ),
    Known(
        ("read_file", "open_file", "cat", "view_file"),
        ("Read a file", "Returns the contents of a file", "Show a file of the project"),
        (Parameter(("path", "file", "filename", "file_path"), "path", ("The {0}", "Path of the file")),),
        Phrases(("read {0}", "open {0}", "show me {0}", "read the file {0}", "print {0}", "show the contents of {0}", "look into {0}", "open the file {0}")),
        Phrases(("What is in {0}?", "What does {0} say?", "What's inside {0}?", "Contents of {0}?", "What are the contents of {0}?", "Explain the file {0}.")),
    ),
    Known(
        ("write_file", "create_file", "save_file"),
        ("Write a file", "Create a file with some contents"),
        (Parameter(("path", "file", "filename"), "path", ("The {0}",)), Parameter(("content", "contents", "text"), "text", ("What to write", "The {0}"))),
        Phrases(("write {1} to {0}", "create {0} with the content {1}", "save {1} in {0}", "make a file {0} that says {1}", "put {1} into the file {0}")),
        Phrases(("New file {0}: {1}", "{0} should contain {1}", "File {0} with {1}")),
    ),
    Known(
        ("list_files", "list_directory", "ls"),
        ("List the files of a folder", "Lists a directory"),
        (Parameter(("path", "directory", "folder", "dir"), "path", ("The {0}",)),),
        Phrases(("list {0}", "list the files in {0}", "show the files of {0}", "show what is in the folder {0}", "list the directory {0}")),
        Phrases(("Which files are in {0}?", "What files does {0} have?", "What is in the folder {0}?")),
    ),
    Known(
        ("get_definition", "define_word", "dictionary"),
        ("Look up the meaning of a word", "Define a word"),
        (Parameter(("word", "term"), "word", ("The {0}",)),),
        Phrases(("define {0}", "look up the word {0}", "find the meaning of {0}", "look {0} up in the dictionary", "explain the word {0}")),
        Phrases(("What does {0} mean?", "What is the definition of {0}?", "What's the meaning of {0}?", "Meaning of {0}?")),
    ),
    Known(
        ("get_recipe", "find_recipe", "search_recipes"),
        ("Find a recipe", "Recipe of a dish"),
        (Parameter(("dish", "meal", "food", "recipe_name"), "thing", ("The {0}",)),),
        Phrases(("find a recipe for {0}", "show me how to cook {0}", "get the recipe of {0}", "cook {0}", "make {0} tonight")),
        Phrases(("How do I cook {0}?", "How do you make {0}?", "Recipe for {0}?", "I want to eat {0}.")),
    ),
)  # fmt: skip
