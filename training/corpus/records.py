"""Records of two or three columns that people extract from plain sentences, and such sentences."""

from __future__ import annotations

from dataclasses import dataclass

from training.corpus.base import Phrases

Column = tuple[tuple[str, ...], str]  # names, kind


@dataclass(frozen=True, slots=True)
class Record:
    """A kind of record. {0} in a sentence is the value of the first column."""

    columns: tuple[Column, ...]
    sentences: Phrases


RECORDS: tuple[Record, ...] = (
    Record(
        ((("name", "full_name", "person"), "name"), (("age", "years"), "integer"), (("city", "town", "location"), "name")),
        Phrases(
            ("{0} is {1} years old and lives in {2}.", "{0}, {1}, lives in {2}.", "My name is {0}, I am {1} and live in {2}.",
             "I am {0} from {2} and I am {1} years old.", "In {2} lives {0}, who is {1}.", "{0} ({1}) from {2}", "{0} is {1} and from {2}.",
             "{0} from {2} is {1} years old.", "{1} years old, {0}, {2}", "{0} is {1}, lives in {2}.", "This is {0}, {1}, from {2}.",
             "Meet {0} from {2}, {1} years old.", "{2} is where {0} lives, at the age of {1}.", "At {1}, {0} still lives in {2}.",
             "{0} turned {1} and moved to {2}.", "Hello, I'm {0}, {1} years old, living in {2}.", "I'm {0} and I'm {1}. I live in {2}.",
             "I am called {0}. I am {1} years old. My home is {2}.", "The age of {0} from {2} is {1}.", "{0} of {2}, aged {1}",
             "We spoke with {0}, aged {1}, who lives in {2}.", "On Monday {0} ({1}) left {2}.", "My friend {0} is {1} and comes from {2}.",
             "Yesterday {0} from {2} turned {1}.", "{0} resides in {2} and is aged {1}.", "{0} was raised in {2} and is {1} today.", "{0} calls {2} home and is {1} years of age.",
             "At the age of {1}, {0} settled in {2}.", "A {1}-year-old named {0} stays in {2}.", "{0}, a {1}-year-old resident of {2}", "{0}: {1} years, {2}", "Born in {2}, {0} is now {1}."),
            ("{0} lives in {2} and is {1} years old.", "My name is {0}, I am {1} years old and from {2}."),
            ("{0} comes from {2} and is {1}.",
             "I live in {2}, my name is {0} and I am {1} years old.", "Our neighbour {0} in {2} is {1}."),
        ),
    ),
    Record(
        ((("product", "item", "name"), "word"), (("price", "cost"), "number"), (("quantity", "count", "amount"), "integer")),
        Phrases(
            ("{2} pieces of {0} at {1} each.", "The {0} costs {1} and we have {2}.", "Order {2} of {0} for {1} each.",
             "I want {2} {0} at {1}.", "We sold {2} of the {0} for {1}.", "{0}: {2} in stock, {1} each",
             "Buy {2} {0} for {1} each.", "{2} x {0} at {1}", "The price of the {0} is {1}, {2} are left.", "{2} {0}, {1} each",
             "They bought {2} of {0} and paid {1} each.", "One {0} is {1}. Send {2}.", "For {1} each we take {2} of the {0}.",
             "There are {2} {0} in the shop for {1}.", "Each {0} costs {1}; I take {2}.", "At {1} per piece I want {2} {0}.",
             "Please send {2} {0}, price {1}.", "{0} at {1}, {2} times", "{2} times {0} for {1}", "We ordered {2} {0}. Each was {1}.",
             "On Friday {2} {0} came, {1} each.", "{2} units of {0} priced at {1}", "{2} {0} sell for {1} each.", "The {0} goes for {1}, {2} are available.", "We stock {2} {0} with a price tag of {1}.",
             "A {0} retails at {1}; {2} remain.", "My basket: {2} {0} at {1}.", "{0} for {1}, {2} pieces"),
            ("I need {2} {0} at {1} each.", "We have {2} {0} for {1}."),
            ("{2} of the {0} cost {1} each.", "Send us {2} {0} for {1} a piece."),
        ),
    ),
    Record(
        ((("event", "name", "title"), "name"), (("date", "day"), "date"), (("place", "location", "venue"), "name")),
        Phrases(
            ("{0} takes place on {1} in {2}.", "On {1} there is {0} in {2}.", "Join us for {0} at {2} on {1}.",
             "{0} in {2}, {1}.", "The date of {0} in {2} is {1}.", "On {1} {2} has {0}.", "On {1} we go to {0} in {2}.",
             "{2} hosts {0} on {1}.", "{0} will be in {2} on {1}.", "{1}: {0} in {2}", "Come to {0} in {2} on {1}.",
             "On {1} {2} hosts {0}.", "On {1}, {0} starts in {2}.", "On {1} {0} opens in {2}.", "On {1} we see {0} at {2}.",
             "In {2} {0} begins on {1}.", "Save the date: {1}, {0}, {2}.", "{2}, {1}: {0}", "Next: {0}, {1}, {2}", "{0} starts on {1} at {2}.",
             "Tickets for {0} in {2} on {1}", "{0} gets under way on {1} in {2}.", "{0} is planned for {1} in {2}.", "{0} is scheduled for {1} at {2}.", "{2} welcomes {0} on {1}.", "On {1}, {2} is the stage for {0}.", "Do not miss {0} ({1}, {2}).", "In {2} there is {0} on {1}.", "We meet for {0} on {1}, in {2}.",
             "{1} is the day of {0} in {2}.", "{1} will bring {0} to {2}.", "This year {0} is held in {2} on {1}."),
            ("On {1} {0} takes place in {2}.",),
            ("{0} is on {1} in {2}.", "The place of {0} on {1} is {2}.", "On {1} we have {0} in {2}."),
        ),
    ),
    Record(
        ((("title", "book", "name"), "name"), (("author", "writer"), "name"), (("year", "published"), "integer")),
        Phrases(
            ("{0} was written by {1} in {2}.", "{1} wrote {0} in {2}.", "{0} by {1} ({2})", "In {2} {1} published {0}.",
             "The book {0} is from {1}, year {2}.", "{0}, {1}, {2}", "{0} ({2}) by {1}", "{1} is the author of {0}, {2}.",
             "Written by {1} in {2}: {0}", "{0} came out in {2} and was penned by {1}.", "{1} released {0} in {2}.", "{0} appeared in {2}; its author is {1}.", "In {2} appeared {0}, a work of {1}.", "{1} published {0} in {2}.", "{1}: {0}, {2}", "I read {0} by {1} from {2}.",
             "{0} is a book of {1} from {2}.", "From {2} is {0}, which {1} wrote.", "{1}, {0} ({2})", "The author of {0} ({2}) is {1}.",
             "In the year {2} {1} finished {0}.", "Have you read {0}? {1} wrote it in {2}.", "It was {1} who wrote {0} in {2}."),
            ("The book {0} was written by {1} in {2}.", "In {2} {1} wrote {0}."),
            ("{1} brought out {0} in {2}.", "The novel {0} by {1} is from {2}."),
        ),
    ),
    Record(
        ((("name", "customer"), "name"), (("email", "contact"), "mail")),
        Phrases(
            ("{0} can be reached at {1}.", "Write to {0} at {1}.", "{0} <{1}>", "Contact {0}: {1}", "The e-mail of {0} is {1}.",
             "{0} has the address {1}.", "You reach {0} at {1}.", "{1} is the mail of {0}.", "{0}: {1}", "Mail {0}: {1}",
             "{0} uses {1}.", "{0} answers at {1}.", "{0} writes from {1}.", "{0} can be contacted via {1}.", "Reach out to {0} through {1}.", "To speak with {0}, use {1}.", "{0} is available under {1}.", "Drop {0} a line at {1}.", "Get in touch with {0}: {1}", "My name is {0}, my mail is {1}.", "I am {0}, {1}.",
             "Send it to {0} ({1}).", "{1} belongs to {0}.", "{1} ({0})", "For {0} use {1}.", "Ask {0} under {1}.", "Email of {0}: {1}",
             "{0} gave us {1}.", "{0} took {1} as address.", "{0} moved to {1}.", "From: {0} {1}", "{0} checks {1} daily.", "{0} likes {1}."),
            ("The address of {0} is {1}.", "{0} reads {1}."),
            ("Please write {0} at {1}.", "{0} owns {1}."),
        ),
    ),
    Record(
        ((("city", "location", "place"), "name"), (("temperature", "degrees"), "integer"), (("condition", "weather", "sky"), "word")),
        Phrases(
            ("It is {1} degrees and {2} in {0}.", "{0}: {1} degrees, {2}", "In {0} it is {2} with {1} degrees.", "{0} has {1} degrees and is {2}.",
             "The weather in {0} is {2}, {1} degrees.", "{2} and {1} degrees in {0}", "Today {0} is {2} at {1} degrees.", "{0} sees {2} skies and {1} degrees.", "Expect {1} degrees in {0}, {2}.", "{2} in {0}, the thermometer reads {1}.", "{0} reports {1} degrees and {2}.",
             "We have {1} degrees in {0} and it is {2}.", "{1} degrees, {2}, {0}"),
            (),
            ("The weather in {0} today: {2}, {1} degrees.", "In {0} we have {1} degrees and it is {2}."),
        ),
    ),
    Record(
        ((("origin", "from", "departure"), "name"), (("destination", "to", "arrival"), "name"), (("date", "day"), "date")),
        Phrases(
            ("From {0} to {1} on {2}.", "I fly from {0} to {1} on {2}.", "On {2} I go from {0} to {1}.", "{0} to {1}, {2}", "{2}: {0} - {1}",
             "A ticket from {0} to {1} for {2}.", "{0} is where I start on {2}, {1} is where I go.", "Departing {0} on {2}, arriving in {1}.", "Book {0} to {1} for {2}.", "Flying out of {0} to {1} on {2}", "To {1} from {0} on {2}.", "We leave {0} on {2} and arrive in {1}.",
             "My train to {1} leaves {0} on {2}.", "On {2} we travel to {1} from {0}.", "{1} from {0} on {2}"),
            (),
            ("I travel from {0} to {1} on {2}.", "On {2} we fly to {1} from {0}.", "A flight from {0} to {1} on {2}, please."),
        ),
    ),
    Record(
        ((("company", "name", "firm"), "name"), (("employees", "staff", "size"), "integer"), (("city", "headquarters", "location"), "name")),
        Phrases(
            ("{0} has {1} employees and sits in {2}.", "{0} from {2} employs {1} people.", "In {2}, {1} people work for {0}.",
             "{0} ({2}) has {1} workers.", "The firm {0} in {2} has a staff of {1}.", "{1} people work at {0} in {2}.", "{0}, {2}, {1} employees",
             "With {1} people, {0} works from {2}.", "{0}, headquartered in {2}, employs {1}.", "{0} of {2} counts {1} employees.", "A staff of {1} works for {0} of {2}.",
             "{0} operates out of {2} with {1} people.", "{0} is located in {2} and has a team of {1}."),
            (),
            ("The company {0} in {2} has {1} employees.", "{0} is based in {2} and employs {1} people."),
        ),
    ),
    Record(
        ((("task", "title", "todo"), "phrase"), (("due", "deadline", "date"), "date"), (("assignee", "owner", "person"), "name")),
        Phrases(
            ("{2} must do {0} until {1}.", "{0} is due on {1}, {2} does it.", "{2}: {0} by {1}", "By {1} {2} finishes {0}.", "{0} ({2}, {1})",
             "Give {0} to {2}, due {1}.", "{2} takes {0}, due on {1}.", "Task {0} for {2} until {1}", "{2} is in charge of {0}, deadline {1}.", "{0} was assigned to {2} and is due {1}.", "{2} should complete {0} before {1}.", "Before {1}, {2} completes {0}.", "The task {0} is for {2}, by {1}."),
            (),
            ("{2} has to finish {0} by {1}.", "{0} must be done by {2} until {1}."),
        ),
    ),
    Record(
        ((("name", "person", "first_name", "user"), "name"), (("age", "years", "age_years"), "integer")),
        Phrases(
            ("{0} is {1} years old.", "{0} is {1}.", "My name is {0} and I am {1}.", "{0}, {1}", "I am {0}, {1} years old.", "{0} turned {1}.",
             "{1} is the age of {0}.", "{0} will be {1} tomorrow.", "{0} reached the age of {1}.", "{0} celebrates a {1}th birthday.", "A {1}-year-old called {0}", "We know that {0} is {1} years of age.", "At {1}, {0} is the oldest.",
             "{0} has been {1} since March.", "My sister {0} is {1}.", "Hello, my name is {0}. I'm {1}.", "I'm {0}, aged {1}."),
            (),
            ("{0} is now {1} years old.", "I am {1} years old and my name is {0}.", "My brother {0} turned {1} today."),
        ),
    ),
    Record(
        ((("item", "product", "name", "fruit"), "word"), (("price", "cost", "amount"), "number")),
        Phrases(
            ("The {0} costs {1}.", "One {0} is {1}.", "A {0} goes for {1}.", "The {0} is available for {1}.", "They charge {1} for the {0}.", "{1} gets you a {0}.", "The {0} was {1}.", "The {0} is listed at {1}.",
             "You get the {0} for {1}.", "That {0} sells at {1}.", "My {0} set me back {1}.", "{0}: {1}", "I paid {1} for the {0}.", "{1} for a {0}", "A {0} for {1}, please.",
             "The price of the {0} is {1}.", "We sell the {0} at {1}.", "{0} at {1}", "They want {1} for the {0}."),
            (),
            ("I bought a {0} for {1}.", "Our {0} is sold for {1}."),
        ),
    ),
    Record(
        ((("participants", "people", "attendees", "names", "guests"), "names"), (("event", "name", "title"), "name"), (("date", "day", "when"), "date")),
        Phrases(
            ("{0} are going to {1} on {2}.", "{0} go to {1} on {2}.", "{0} will attend {1} on {2}.", "On {2}, {0} meet at {1}.", "{1} on {2} with {0}",
             "{1} takes place on {2}; {0} are invited.", "{0} met for {1} on {2}.", "{2}: {1} with {0}", "On {2} there is {1}. {0} come.", "{0} visit {1} on {2}.",
             "I invited {0} to {1} on {2}.", "{0} have {1} on {2}.", "Guests of {1} ({2}): {0}", "We go to {1} on {2}: {0}."),
        ),
    ),
    Record(
        ((("items", "products", "ingredients", "things"), "names"), (("customer", "name", "buyer"), "name")),
        Phrases(
            ("{1} buys {0}.", "{1} ordered {0}.", "For {1}: {0}", "{0} for {1}", "{1} needs {0}.", "{1} wants {0}, please.", "Send {0} to {1}.", "{1} has {0}."),
        ),
    ),
    Record(
        ((("name", "person", "employee"), "name"), (("job", "occupation", "role"), "word"), (("city", "place", "office"), "name")),
        Phrases(
            ("{0} works as a {1} in {2}.", "{0} is a {1} from {2}.", "{0} is employed as a {1} in {2}.", "{0} earns a living as {1} in {2}.", "In {2} you find {0}, a {1}.", "{0}, who lives in {2}, is a {1}.", "{0}, {1}, {2}", "In {2}, {0} has a job as {1}.", "The {1} in {2} is {0}.",
             "{0} from {2} is our {1}.", "Our new {1} is {0} in {2}.", "I am {0}, {1} in {2}.", "{2} needed a {1} and found {0}."),
            (),
            ("{0} is the {1} in {2}.", "My name is {0} and I work as a {1} in {2}."),
        ),
    ),
    Record(
        ((("product", "title", "item"), "name"), (("rating", "stars", "score"), "integer"), (("comment", "review", "text"), "phrase")),
        Phrases(
            ("I give {0} {1} stars: {2}", "{0}, {1} of 10. {2}", "{1} stars for {0}. {2}", "{0} gets {1} points, {2}.", "My review of {0}: {1} stars, {2}",
             "{0} - {1}/10 - {2}", "{0}: {1} stars, {2}"),
            (),
            ("I rate {0} with {1}: {2}", "{1} points for {0}: {2}"),
        ),
    ),
)  # fmt: skip
