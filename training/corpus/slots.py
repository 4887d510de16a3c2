"""Tools as clients write them: parameters with a meaning (a place, a date, a limit), asked for in plain sentences.

A tool is a verb, something it is about, and one to four slots. Each slot has names, types, descriptions, and
phrases that give it a value: "Find hotels in Lisbon for 2 people from June 3 under 200". The last sixth of every list of phrases is held out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from training.corpus.base import Draw
from training.corpus.values import capitals, iso_date, mail, marked, spoken_day, spoken_time


@dataclass(frozen=True, slots=True)
class Slot:
    names: tuple[str, ...]
    kind: str  # kind of value, see ``_value``
    about: tuple[str, ...]
    phrases: tuple[str, ...]  # follow the request
    options: tuple[tuple[str, ...], ...] = ()  # values of an enum


_LANGUAGES = ("english", "french", "german", "spanish", "italian", "dutch")
SLOTS: tuple[Slot, ...] = (
    Slot(("location", "city", "place", "area", "region", "town", "destination", "address", "where", "city_name"), "place",
         ("The city and country, e.g. Bogotá, Colombia", "City name", "The location to search in", "Where to look", "The city",
          "The name of the city or town for which the information is requested", "Name of the place"),
         ("in {v}", "in {v}", "in {v}", "near {v}", "around {v}", "at {v}", "for {v}", "close to {v}", "over in {v}")),
    Slot(("date", "day", "when", "start_date", "on_date", "departure_date"), "day",
         ("The date in YYYY-MM-DD format", "Date", "The day", "When", "The date to check", "Day of the event, as the user said it"),
         ("on {v}", "for {v}", "from {v}", "starting {v}", "on {v}", "by {v}", "as of {v}")),
    Slot(("time", "at", "start_time", "hour", "time_of_day"), "time", ("Time of day", "The time", "When it starts", "24 hour time"),
         ("at {v}", "from {v}", "around {v}", "starting at {v}")),
    Slot(("limit", "max_results", "count", "num_results", "top_k", "n", "number"), "integer",
         ("Maximum number of results", "How many results to return", "The number of items", "Limit (default 10)"),
         ("limited to {v}", "at most {v}", "{v} results", "max {v}", "up to {v} results", "no more than {v}", "just {v} of them")),
    Slot(("guests", "people", "party_size", "num_guests", "adults", "passengers", "seats"), "integer",
         ("Number of people", "How many guests", "The number of passengers", "Number of adults"),
         ("for {v} people", "for {v} guests", "for a party of {v}", "for {v}", "for {v} persons", "for {v} adults", "with {v} people")),
    Slot(("max_price", "budget", "price_limit", "maximum_price", "price_max"), "amount",
         ("The highest price", "Budget in dollars", "Maximum price per item", "Upper limit of the price"),
         ("under {v}", "below {v} dollars", "for less than {v}", "under ${v}", "cheaper than {v}", "up to {v} euros", "for at most {v}")),
    Slot(("min_rating", "rating", "stars", "minimum_rating", "min_stars"), "small",
         ("Minimum rating from 1 to 5", "Stars", "Lowest rating to include"),
         ("with at least {v} stars", "rated {v} or better", "with {v} stars", "with a rating of {v}", "with a rating above {v}")),
    Slot(("days", "num_days", "nights", "duration_days", "forecast_days"), "small",
         ("Number of days", "How many days", "Length in days", "Number of nights"),
         ("for {v} days", "for the next {v} days", "over {v} days", "lasting {v} days", "for {v} nights")),
    Slot(("unit", "units", "scale", "temperature_unit"), "enum", ("The unit to use", "Temperature unit", "Unit of the answer", "Unit system"),
         ("in {v}", "measured in {v}", "using {v}", "in {v}, please", "({v})"),
         (("celsius", "fahrenheit"), ("metric", "imperial"), ("celsius", "fahrenheit", "kelvin"), ("km", "miles"), ("kg", "lb"))),
    Slot(("language", "lang", "locale", "target_language"), "enum", ("Language of the answer", "The language", "Output language"),
         ("in {v}", "written in {v}", "into {v}"), (_LANGUAGES, _LANGUAGES[:3], ("en", "fr", "de"), ("English", "French", "German", "Spanish"))),
    Slot(("sort_by", "order", "sort", "sort_order"), "enum", ("How to sort", "Sort order of the results", "Field to sort by"),
         ("sorted by {v}", "ordered by {v}", "sort by {v}", "by {v}"),
         (("price", "rating", "distance"), ("date", "name"), ("relevance", "date", "price"), ("newest", "oldest"))),
    Slot(("priority", "urgency", "level", "importance"), "enum", ("Priority of the item", "How urgent it is", "The level"),
         ("with {v} priority", "with priority {v}", "priority {v}", "at {v} priority", "marked {v}"), (("low", "medium", "high"), ("low", "normal", "high", "urgent"))),
    Slot(("size", "format", "mode", "type", "category", "style", "kind"), "options", ("Which one", "The type", "One of the allowed values", "The kind to use"),
         ("as {v}", "in {v}", "of type {v}", "type {v}", "{v} only", "in {v} mode", "the {v} kind")),
    Slot(("name", "customer", "person", "user", "owner", "author", "artist", "full_name", "contact"), "name",
         ("The full name", "Name of the person", "Who it is for", "The name of the customer", "The person's name"),
         ("for {v}", "by {v}", "of {v}", "under the name {v}", "in the name of {v}", "on behalf of {v}", "belonging to {v}")),
    Slot(("email", "to", "recipient", "email_address", "contact_email"), "mail", ("E-mail address", "The recipient's email address", "Where to send it"),
         ("to {v}", "for {v}", "at {v}", "with the email {v}", "and mail it to {v}")),
    Slot(("query", "q", "keyword", "topic", "search_term", "subject", "text"), "text",
         ("What to search for", "The search query", "Keywords", "Free text", "The topic", "The text, as the user gave it"),
         ("about {v}", "on {v}", "about \"{v}\"", "matching \"{v}\"", "with the words {v}", "for \"{v}\"", "that say \"{v}\"", ": {v}")),
    Slot(("id", "order_id", "user_id", "number", "ticket_id", "account_id", "invoice_number", "reference"), "code",
         ("The identifier", "Unique id", "The number of the order", "ID as printed on the invoice"),
         ("with id {v}", "number {v}", "with the number {v}", "for id {v}", "{v}", "no. {v}", "#{v}", "with the ID {v}", "under {v}")),
    Slot(("origin", "from_city", "source", "departure", "start"), "name", ("Where it starts", "City of departure", "The starting point"),
         ("from {v}", "leaving from {v}", "starting in {v}", "out of {v}")),
    Slot(("destination", "to_city", "target", "arrival", "end"), "name", ("Where it goes", "City of arrival", "The end point"),
         ("to {v}", "going to {v}", "towards {v}", "that go to {v}")),
    Slot(("currency", "currency_code"), "upper3", ("Three-letter currency code", "Currency", "ISO code, e.g. USD"),
         ("in {v}", "paid in {v}", "with prices in {v}", "shown in {v}")),
    Slot(("symbol", "ticker", "code", "airport"), "upper", ("Ticker symbol, e.g. AAPL", "The code", "Symbol of the company"),
         ("for {v}", "of {v}", "for the symbol {v}", "with code {v}")),
    Slot(("include_details", "verbose", "detailed", "with_details", "full"), "details", ("Whether to include details", "If true, the answer is longer", "Include all details"),
         ("with details", "with all details", "in detail", "including details")),
    Slot(("in_stock", "available", "only_available", "open_now", "is_open"), "available", ("Only what is available", "Whether it must be open now", "Available only"),
         ("that is available now", "only what is available", "only if available", "available right now")),
    Slot(("notify", "send_notification", "alert", "email_me", "confirm"), "notify", ("Whether to notify the user", "Send a message when done", "Notify"),
         ("and notify me", "and let me know", "and send me a notification", "without notifying me", "and don't notify me", "with no notification")),
    Slot(("radius", "radius_km", "distance", "max_distance"), "integer", ("Radius in kilometres", "How far away at most", "Search radius"),
         ("within {v} km", "in a radius of {v} km", "within {v} kilometres", "no further than {v} km")),
    Slot(("restaurant", "venue", "company", "store", "airline", "hotel_name", "product", "title", "movie", "item_name"), "name",
         ("Name of the restaurant", "The company", "Title as the user gave it", "The product", "Exact name", "Which store"),
         ("at {v}", "from {v}", "with {v}", "called {v}", "named {v}", "at the {v}", "\"{v}\"", "titled \"{v}\"", "by {v}")),
    Slot(("items", "tags", "ingredients", "names", "cities", "attendees", "topics", "products", "labels", "participants"), "list",
         ("A list of them", "The items", "All that the user named", "List of strings", "The participants"),
         ("with {v}", "for {v}", "containing {v}", ": {v}", "including {v}", "about {v}", "made of {v}", "tagged {v}")),
    Slot(("state", "power", "status", "switch"), "enum", ("Whether to turn it on or off", "The new state", "on or off"),
         ("{v}", "to {v}", "turned {v}", "switched {v}", "set to {v}"), (("on", "off"), ("open", "closed"), ("on", "off", "auto"))),
    Slot(("on", "enabled", "active", "turn_on", "is_on"), "switch", ("True for on", "Whether it is on", "New state"),
         ("on", "off", "turned on", "turned off", "switched on", "switched off")),
    Slot(("paid", "urgent", "public", "private", "vegetarian", "gluten_free", "express", "refundable", "furnished", "recurring", "encrypted",
          "archived", "draft", "anonymous", "breakfast", "parking", "wifi", "insured", "gift_wrapped", "shared", "pinned", "completed"), "flag",
         ("True or false", "Whether it is so", "Set to true if the user says so", "Flag"), ("-",)),
    Slot(("latitude", "lat"), "decimal", ("Latitude", "Degrees north"), ("at latitude {v}", "latitude {v}", "lat {v}")),
    Slot(("longitude", "lon", "lng"), "decimal", ("Longitude", "Degrees east"), ("longitude {v}", "at longitude {v}", "lon {v}")),
    Slot(("amount", "total", "sum", "value", "quantity"), "number", ("The amount", "How much", "Amount to transfer", "The value"),
         ("of {v}", "for {v}", "worth {v}", "with an amount of {v}", "amounting to {v}", "over {v} units")),
    Slot(("minutes", "duration", "duration_minutes", "length"), "integer", ("Length in minutes", "Duration", "How long it takes"),
         ("for {v} minutes", "of {v} minutes", "lasting {v} minutes", "that takes {v} minutes", "({v} minutes)")),
    Slot(("color", "colour", "room", "device", "brand", "genre", "cuisine", "ingredient", "model"), "word",
         ("Which one", "Name of it", "For example red", "What it should be"), ("in {v}", "for {v}", "of {v}", "with {v}", "called {v}", "like {v}")),
    Slot(("value", "reference", "phone", "url", "file", "path", "filename", "website"), "marked", ("The value", "As the user gave it", "Full path or number"),
         ("for {v}", "with {v}", "at {v}", "on {v}", "of {v}", "to {v}", "under {v}")),
)  # fmt: skip
NOUNS = (
    "weather", "forecast", "hotel", "hotels", "restaurant", "restaurants", "flight", "train", "trains", "recipe", "movie", "movies", "song",
    "news", "article", "articles", "product", "products", "order", "invoice", "ticket", "tickets", "event", "events", "meeting",
    "appointment", "reminder", "task", "note", "message", "contact", "employee", "customer", "account", "payment", "transaction",
    "balance", "stock", "price", "prices", "book", "books", "job", "jobs", "course", "apartment", "house", "car", "taxi", "route", "map",
    "temperature", "air quality", "humidity", "wind", "sunrise", "population", "timezone", "holiday", "holidays", "concert", "museum",
    "shop", "shops", "parking", "bus", "gym", "doctor", "doctors", "pharmacy", "hospital", "game", "games", "score", "team", "player",
    "photo", "photos", "image", "video", "document", "file", "files", "report", "log", "logs", "server", "light", "lights", "lamp",
    "thermostat", "door", "alarm", "timer", "playlist", "album", "podcast", "translation", "definition", "synonym", "quote", "joke",
    "workout", "meal", "diet", "budget", "loan", "insurance", "shipment", "package", "delivery", "coupon", "discount", "review",
    "reviews", "survey", "poll", "campaign", "lead", "deal", "contract", "subscription", "user profile", "stock price", "exchange rate",
    "shipping status", "order status", "flight status", "bank account", "rental car", "support ticket", "calendar event", "search history",
)  # fmt: skip
VERBS = ("get", "find", "search", "list", "show", "look up", "fetch", "check", "book", "create", "reserve", "order", "send", "update", "cancel",
          "calculate", "add", "track", "set", "schedule", "delete", "retrieve", "request", "compare", "rent", "open", "make", "plan", "give me",
          "tell me", "pull up", "display", "bring up")  # fmt: skip
NAMED = {"give me": "get", "tell me": "get", "look up": "lookup", "pull up": "fetch", "bring up": "show"}
_YES = (
    "{0}",
    "already {0}",
    "that is {0}",
    "and it is {0}",
    "with {0}",
    "marked as {0}",
    "make it {0}",
    "and {0}",
    "which is {0}",
    "as {0}",
)
_NO = (
    "not {0}",
    "that is not {0}",
    "without {0}",
    "and it is not {0}",
    "not yet {0}",
    "but not {0}",
    "no {0}",
    "which isn't {0}",
    "not {0}",
)
ABOUT = (
    "{V} the current {n}", "{V} {n}", "{V} {n} for a location", "{V} a {n}", "{V} the {n} for the user.", "{V}s {n} and returns them as JSON.",
    "{V} {n} by several criteria", "{V} {n}. All parameters but the first are optional.", "A function to {v} {n}", "Use this function to {v} {n}",
    "{V} {n} matching the given parameters. Call it whenever the user asks about {n}.", "{V} information about {n}", "{N} service",
    "{N} API: {v} the {n} that the user wants", "Call this when the user wants to {v} {n}; never guess values.", "{V} the latest {n} data",
    "{V} the {n} with the given details", "Lets the assistant {v} {n} on behalf of the user", "{N}", "Get {n} details",
)  # fmt: skip
_REQUESTS = (
    "{v} {n} {s}", "{v} {n} {s}", "{v} the {n} {s}", "{v} a {n} {s}", "{v} me the {n} {s}", "{v} some {n} {s}", "{v} the current {n} {s}",
)  # fmt: skip
_QUESTIONS = (
    "What is the {n} {s}?", "What's the {n} {s}?", "Which {n} are there {s}?", "Is there a {n} {s}?", "Are there any {n} {s}?", "I need a {n} {s}.",
    "I am looking for {n} {s}.", "I want a {n} {s}.", "Any {n} {s}?", "{n} {s}", "{N} {s}", "{N} {s}, please.", "Do you have {n} {s}?",
    "What about {n} {s}?", "How is the {n} {s}?", "How's the {n} {s} today?", "What's the {n} like {s}?", "We need {n} {s}.",
    "What is the current {n} {s}?", "What's the {n} {s} right now?", "Could I get the {n} {s}?", "I'd like a {n} {s}.", "Show {n} {s}",
    "Tell me about the {n} {s}.", "Where can I find {n} {s}?", "Do we have any {n} {s}?", "How much is the {n} {s}?", "Can I see the {n} {s}?",
    "I'm looking for a {n} {s}", "Help me find a {n} {s}", "What {n} do you have {s}?", "What can you tell me about {n} {s}?",
)  # fmt: skip
_OBJECTS = (
    "Find me {o} {s}", "find {o} {s}", "search for {o} {s}", "I'm looking for {o} {s}", "I need {o} {s}.", "Show me {o} {s}.", "I want {o} {s}",
    "Look for {o} {s}", "{O} {s}", "Do you have {o} {s}?", "Are there any {o} {s}?", "Can you find {o} {s}?", "buy {o} {s}", "Get me {o} {s}, please.",
    "I would love some {o} {s}", "Where do I get {o} {s}?", "Please look up {o} {s}.", "Help me find {o} {s}", "Is there {o} {s}?", "Order {o} {s}",
)  # fmt: skip
_TEXTS = (
    "how to {f} a {w}", "the best {w} for {w2}", "{w} and {w2}", "call {N}", "buy {w}", "I will be late", "see you at the {w}", "the {w} is ready",
    "{N} needs a {w}", "what {w} means", "cheap {w}", "{w} in {N}", "get the {w}", "be on time", "why {w} matters", "{w}", "{w} {w2}",
    "history of {N}", "new {w} for the {w2}", "we meet in {N}", "bring your {w}", "happy birthday", "lunch with {N}", "{N} {w}", "a {w} for my {w2}",
    "please send the {w}", "water the plants", "feed the cat", "thank you for the {w}", "no news yet", "clean the {w}", "how {N} works",
)  # fmt: skip


def text(draw: Draw) -> str:
    """Returns a few words as people write them."""
    words = {
        "w": draw.word(),
        "w2": draw.word(),
        "N": draw.name(),
        "f": draw.pick(("make", "fix", "cook", "build", "paint", "sell")),
    }
    return str(draw.pick(_TEXTS)).format(**words)


def _value(draw: Draw, slot: Slot) -> tuple[dict[str, Any], Any, str]:
    """Returns (schema, value, phrase that states it)."""
    phrase = draw.phrase(slot.phrases)
    schema: dict[str, Any] = {"type": "string"}
    value: Any
    kind = slot.kind
    if kind in ("integer", "small"):
        value = draw.integer(1, 9 if kind == "small" else draw.pick((20, 100, 1000)))
        schema = {"type": draw.pick(("integer", "integer", "number"))}
    elif kind in ("amount", "number", "decimal"):
        value = draw.integer(1, draw.pick((99, 500, 5000)))
        if kind == "decimal" or draw.chance(0.4):
            value = round(value % 180 + draw.integer(1, 99) / 100, 2)
        schema = {"type": "number"}
    elif kind in ("details", "available", "notify", "switch", "flag"):
        value = not any(no in phrase for no in ("without", "don't", "no ", "off"))
        schema = {"type": "boolean"}
    elif kind in ("enum", "options"):
        options = (
            draw.pick(slot.options)
            if slot.options and draw.chance(0.8)
            else tuple(draw.words(draw.integer(2, 5)))
        )
        value = draw.pick(options)
        schema = {"type": "string", "enum": list(options)}
    elif kind == "list":
        value = (
            [draw.name() for _ in range(draw.integer(1, 4))]
            if draw.chance(0.4)
            else draw.words(draw.integer(1, 4))
        )
        schema = {"type": "array", "items": {"type": "string"}}
    elif kind == "code":
        value = (
            draw.integer(1, 99999)
            if draw.chance(0.5)
            else f"{capitals(draw, 1, 3)}{draw.pick(('-', '', '-'))}{draw.integer(1, 9999)}"
        )
        schema = {"type": "integer" if isinstance(value, int) else "string"}
    elif kind == "place":
        value = f"{draw.name()}, {draw.name()}" if draw.chance(0.1) else draw.name()
    else:
        value = {
            "day": lambda: iso_date(draw) if draw.chance(0.4) else spoken_day(draw),
            "time": lambda: spoken_time(draw),
            "name": draw.name,
            "mail": lambda: mail(draw),
            "text": lambda: text(draw),
            "upper3": lambda: capitals(draw, 3, 3),
            "upper": lambda: capitals(draw, 2, 4),
            "word": draw.word,
            "marked": lambda: marked(draw),
        }[kind]()  # fmt: skip
    if draw.chance(0.7):
        schema = {"type": schema.pop("type"), "description": draw.pick(slot.about), **schema}
    shown = value if not isinstance(value, list) else listed(value)
    return schema, value, phrase.format(v=shown)


def listed(items: list[str]) -> str:
    """Returns "a, b and c"."""
    return f"{', '.join(items[:-1])} and {items[-1]}" if len(items) > 1 else items[0]


@dataclass(frozen=True, slots=True)
class Filled:
    """One slot of a tool. ``phrase`` is None if the user omits it."""

    name: str
    schema: dict[str, Any]
    value: Any
    phrase: str | None


def slots(draw: Draw) -> list[Filled]:
    """Returns one to four slots, the first always stated; no two of the same kind or easily confused ones."""
    filled: dict[str, Filled] = {}
    kinds: set[str] = set()
    wanted = draw.pick((1, 1, 1, 2, 2, 3, 4))
    while len(filled) < wanted:
        slot = draw.pick(SLOTS[:1] if not filled and draw.chance(0.3) else SLOTS)
        kind = {"place": "name", "small": "integer", "amount": "integer", "number": "integer", "upper3": "upper",
                "options": "enum", "marked": "code"}.get(slot.kind, slot.kind)  # fmt: skip
        named = slot.phrases[0].startswith(
            ("limited", "for {v} people", "under", "with at least", "within", "from", "to {v}")
        )
        kind = slot.phrases[0] if named and slot.kind != "mail" else kind
        name = draw.pick(slot.names)
        if kind in kinds or name in filled:
            continue
        kinds.add(kind)
        schema, value, phrase = _value(draw, slot)
        if slot.kind == "flag":
            name = draw.word() if draw.chance(0.3) else name
            value = draw.chance(0.6)
            phrase = str(draw.pick(_YES if value else _NO)).format(name.replace("_", " "))
        filled[name] = Filled(name, schema, value, phrase if not filled or draw.chance(0.75) else None)
    return list(filled.values())


def _object(draw: Draw, filled: list[Filled]) -> tuple[str, bool]:
    """The first value is the object of the request: "Find me running shoes under 100"."""
    value = str(filled[0].value)
    rest = " ".join(one.phrase for one in filled[1:] if one.phrase is not None)
    sentence = draw.phrase(_OBJECTS).format(o=value, O=value, s=rest)
    return sentence.replace(" .", ".").replace(" ?", "?").replace(" ,", ",").strip(), False


def request(draw: Draw, verb: str, noun: str, filled: list[Filled]) -> tuple[str, bool]:
    """Returns (request, whether it is a lower-case imperative that ``wish`` may wrap)."""
    said = [one.phrase for one in filled if one.phrase is not None]
    if len(said) > 1 and draw.chance(0.4):
        draw.rng.shuffle(said)
    words = draw.pick((" ", " ", " ", ", ")).join(said)
    if (
        verb in ("search", "find")
        and isinstance(filled[0].value, str)
        and f'"{filled[0].value}"' in (filled[0].phrase or "")
        and draw.chance(0.6)
    ):
        return _object(draw, filled)
    is_order = draw.chance(0.5)
    pattern = draw.phrase(_REQUESTS if is_order else _QUESTIONS)
    if not is_order and draw.chance(0.12):
        pattern = draw.pick(
            ("{S}: {n}", "{S}, the {n}", "{S}, what {n} is there?", "{S}, which {n} can I get?")
        )
    sentence = pattern.format(v=verb, n=noun, N=noun.capitalize(), s=words, S=words[0].upper() + words[1:])
    return sentence.replace(" :", ":"), is_order
