"""Prompts of three kinds for training and measuring drafts: chat, code of Python's standard library,
extraction from generated texts.

Held-out prompts have no topic, no module, no field and no template in common with those of training.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

KINDS = ("chat", "code", "extraction")
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings"}
LINES = (5, 24)
"""Of a function that is asked about: least and most."""
MOST_CHARACTERS = 900


class Words(NamedTuple):
    """What prompts are made of; held-out prompts have words of their own."""

    topics: Sequence[str]
    chat: Sequence[str]
    code: Sequence[str]
    asked: Sequence[str]
    texts: dict[str, Sequence[str]]
    """Kind of record -> sentences."""


def _lines(text: str) -> list[str]:
    r"""One template a line, in which \n is a line break."""
    return [line.strip().replace(r"\n", "\n") for line in text.strip().splitlines()]


_TOPICS = """
    volcanoes; the moon; gravity; black holes; photosynthesis; bees; whales; dogs; cats; elephants;
    dinosaurs; the human heart; the brain; sleep; dreams; vitamins; bread; cheese; coffee; tea;
    chocolate; rice; soup; pizza; salad; running; swimming; yoga; chess; football; basketball; cycling;
    hiking; camping; gardening; painting; music; the piano; the guitar; jazz; opera; poetry; novels;
    Shakespeare; Mozart; Leonardo da Vinci; Marie Curie; Isaac Newton; Albert Einstein; Julius Caesar;
    Napoleon; Cleopatra; ancient Rome; ancient Egypt; ancient Greece; the Renaissance; the Industrial
    Revolution; the French Revolution; the First World War; the Cold War; democracy; elections; taxes;
    money; banks; inflation; insurance; the stock market; marketing; small businesses; job interviews;
    teamwork; leadership; time management; stress; friendship; family; parenting; school; homework;
    reading; writing; learning a language; Spanish; Chinese; grammar; mathematics; fractions; prime
    numbers; geometry; statistics; probability; algebra; computers; the internet; email; passwords;
    programming; Python; databases; robots; artificial intelligence; smartphones; batteries;
    electricity; magnets; light; sound; heat; water; ice; clouds; rain; snow; hurricanes; earthquakes;
    rivers; the ocean; mountains; deserts; forests; Africa; Japan; Brazil; Canada; India; France; Paris;
    London; New York; airplanes; trains; cars; bicycles; ships; bridges; houses; furniture; clothes;
    cotton; glass; steel; plastic; recycling; climate change; solar power; wind power; coal; oil; atoms;
    molecules; cells; DNA; bacteria; viruses; vaccines; doctors; hospitals; first aid; exercise; a
    healthy diet
"""
_HELD_TOPICS = """
    the sun; Mars; tides; penguins; horses; spiders; the lungs; memory; sugar; apples; pancakes; tennis;
    skiing; photography; the violin; theatre; Galileo; Joan of Arc; the Vikings; the Middle Ages;
    citizenship; budgets; salaries; public speaking; kindness; libraries; German; decimals; triangles;
    keyboards; video games; lasers; thunderstorms; lakes; islands; Australia; Italy; Rome; submarines;
    castles; wool; paper; nuclear power; oxygen; muscles; dentists; meditation; birthdays; neighbors;
    museums
"""


def _words(text: str) -> list[str]:
    return [" ".join(each.split()) for each in text.split(";")]


_FIRST = (
    "Anna Ben Carla David Elena Frank Grace Henry Ines Jack "
    "Kate Liam Maria Noah Olga Paul Rosa Sam Tina Victor"
)
_LAST = (
    "Smith Garcia Miller Rossi Novak Tanaka Brown Silva "
    "Weber Patel Jensen Cohen Moreau Kim Walker Lopez Adams"
)
_CITIES = (
    "Boston Madrid Oslo Lagos Toronto Vienna Lima Kyoto Dublin Cairo Denver Porto Seattle Milan Athens Sydney"
)
_THINGS = (
    "desk lamp,office chair,laptop,coffee machine,printer,backpack,phone case,keyboard,headset,water bottle"
)
_JOBS = "engineer,teacher,nurse,accountant,designer,chef,lawyer,mechanic,librarian,architect,pilot,plumber"
_FIRMS = (
    "Northwind,Acme,Bluebird,Greenfield,Sunrise,Redwood,Silverline,Harbor,Summit,Evergreen,Lakeside,Pioneer"
)
_MONTHS = "January February March April May June July August September October November December"

TRAINING = Words(
    _words(_TOPICS),
    _lines(r"""
        What is {}?
        Explain {} in simple words.
        Explain {} to a child.
        Tell me something interesting about {}.
        Write a short paragraph about {}.
        What should everybody know about {}?
        Give me five facts about {}.
        List three common questions about {} and answer them.
        Write a short story about {}.
        Write a poem about {}.
        I am new to this. Where do I start with {}?
        Why does {} matter?
        How has {} changed over the years?
        What are the advantages and disadvantages of {}?
        Describe {} in two sentences.
        Summarize what is known about {}.
        Can you help me understand {}?
        What are common mistakes people make about {}?
        Write an introduction to an essay about {}.
        What is the history of {}?
        Give me some tips on {}.
        Name some words that have to do with {} and explain each.
        Write a short dialogue between two friends about {}.
        How would you teach {} to a class?
        What is the first thing that comes to your mind about {}?
    """),
    _lines(r"""
        Complete this Python function:\n\n```python\n{half}\n```
        Finish the following code.\n\n```python\n{half}\n```
        Here is the beginning of a function. Write the whole function.\n\n{half}
        What does this function do?\n\n```python\n{whole}\n```
        Explain this code step by step:\n\n```python\n{whole}\n```
        Add comments to this code:\n\n```python\n{whole}\n```
        Write a docstring for this function:\n\n```python\n{whole}\n```
        Rename the function `{name}` to `run` and show the whole code.\n\n```python\n{whole}\n```
        Write a Python function named `{name}`.
        Write tests for this function:\n\n```python\n{whole}\n```
    """),
    _lines(r"""
        Extract {fields} from this text as JSON.\n\n{text}
        {text}\n\nList {fields}.
        Read the text and answer with {fields}, one per line.\n\nText: {text}
        Text: {text}\n\nReturn a JSON object with {fields}.
        Find {fields} in the following message:\n\n"{text}"
        From the text below, extract {fields}.\n\n{text}\n\nAnswer:
    """),
    {
        "the name, the city and the job": _lines(r"""
            {person} is a {job} from {city} who has worked for {firm} since {month} {year}.
            My name is {person}. I live in {city} and work as a {job} at {firm}.
            Last {month}, {person}, a {job}, moved to {city} to join {firm}.
        """),
        "the item, the price and the date": _lines(r"""
            On {month} {day}, {year}, {person} bought a {thing} for ${price} in {city}.
            Invoice {number}: one {thing}, ${price}, ordered on {month} {day}, {year} by {person}.
            {firm} sold a {thing} to {person} on {month} {day}. The price was ${price}.
        """),
        "the sender, the date and the place": _lines(r"""
            Hi {other}, can we meet on {month} {day} in {city} to talk about the {thing}? Best, {person}
            Dear {other}, the meeting at {firm} in {city} is on {month} {day}, {year}. Regards, {person}
        """),
        "the order number, the customer and the item": _lines(r"""
            Order {number} for {person} contains a {thing} and ships from {city} on {month} {day}.
            {person} called about order {number}: the {thing} arrived broken on {month} {day}.
        """),
    },
)
HELD_OUT = Words(
    _words(_HELD_TOPICS),
    _lines(r"""
        What can you tell me about {}?
        Give me a brief overview of {}.
        Write a letter to a friend about {}.
        What makes {} special?
        Please answer in one paragraph: what do people like about {}?
        Compare {} with something similar.
        Write three quiz questions about {} with answers.
        How does one explain {} to a beginner?
    """),
    _lines(r"""
        Continue this code:\n\n```python\n{half}\n```
        Please describe the purpose of this function.\n\n```python\n{whole}\n```
        Rewrite this function with type annotations:\n\n```python\n{whole}\n```
        Give an example call of this function.\n\n```python\n{whole}\n```
    """),
    _lines(r"""
        {text}\n\nWhat are {fields}? Answer as JSON.
        Please pick {fields} out of this sentence: {text}
        Fill in {fields} from the note below.\n\nNote: {text}
    """),
    {
        "the guest, the hotel and the arrival date": _lines(r"""
            {person} has booked a room at the {firm} Hotel in {city} and arrives on {month} {day}, {year}.
            The {firm} Hotel expects {person} on {month} {day}; booking {number} is paid.
        """),
        "the winner, the prize and the amount": _lines(r"""
            The {firm} Prize of ${price} went to {person}, a {job} from {city}, in {month} {year}.
            {person} won the {firm} Prize, which comes with ${price}, ahead of {other}.
        """),
    },
)


def prompts(kind: str, words: Words, seed: int) -> Iterator[str]:
    """What a user says: without end, the same ones for a seed."""
    rng = random.Random(f"{seed} {kind}")
    while True:
        yield _MAKERS[kind](words, rng)


def _chat(words: Words, rng: random.Random) -> str:
    return rng.choice(words.chat).format(rng.choice(words.topics))


def _extraction(words: Words, rng: random.Random) -> str:
    fields, sentences = rng.choice(sorted(words.texts.items()))
    person, other = (f"{rng.choice(_FIRST.split())} {rng.choice(_LAST.split())}" for _ in range(2))
    text = rng.choice(sentences).format(
        person=person,
        other=other.split()[0],
        city=rng.choice(_CITIES.split()),
        job=rng.choice(_JOBS.split(",")),
        firm=rng.choice(_FIRMS.split(",")),
        thing=rng.choice(_THINGS.split(",")),
        month=rng.choice(_MONTHS.split()),
        day=rng.randrange(1, 29),
        year=rng.randrange(1990, 2026),
        price=f"{rng.randrange(1, 900)}.{rng.randrange(100):02}",
        number=rng.randrange(1000, 99999),
    )
    return rng.choice(words.asked).format(fields=fields, text=text)


def _code(words: Words, rng: random.Random) -> str:
    name, lines = rng.choice(functions(words is HELD_OUT))
    half = lines[: max(2, len(lines) // 2)]
    template = rng.choice(words.code)
    return template.format(name=name, whole="\n".join(lines), half="\n".join(half))


_MAKERS = {"chat": _chat, "code": _code, "extraction": _extraction}


@cache
def functions(held_out: bool) -> list[tuple[str, list[str]]]:
    """Names and source lines of the standard library's functions, of each fifth module or of the others."""
    library = Path(sysconfig.get_path("stdlib"))
    found = []
    for index, path in enumerate(sorted(library.rglob("*.py"))):
        if SKIPPED & set(path.relative_to(library).parts) or (index % 5 == 0) != held_out:
            continue
        try:
            text = path.read_text()
            tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            own = [line[node.col_offset :] for line in lines[node.lineno - 1 : node.end_lineno]]
            if LINES[0] <= len(own) <= LINES[1] and sum(map(len, own)) < MOST_CHARACTERS:
                found.append((node.name, own))
    return found
