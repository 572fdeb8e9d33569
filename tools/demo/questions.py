"""What is asked in the demo corpus, in which words, and which of the wordings are kept out of training.

Every fact is a `Fact`: a kind, noun phrases that name what is asked ("the capital of France"), whole questions that
suit only this kind, and one exact answer. A *wording* is an opener of `OPENERS` around the noun phrase of one index.
`held_out(kind, opener, phrase)` sets a fifth of all wordings of a kind aside: they are never used for training, while
every opener, every phrase form and every fact is.
"""
from __future__ import annotations

import random
from dataclasses import dataclass, field

import facts as F

# {} is the noun phrase; {^} is the noun phrase with a capital letter.
OPENERS = (
    "What is {}?",
    "What's {}?",
    "Tell me {}.",
    "Please tell me {}.",
    "Can you tell me {}?",
    "Do you know {}?",
    "Could you tell me what {} is?",
    "I want to know {}.",
    "I would like to know {}.",
    "Give me {}.",
    "{^}?",
    "{^}, please.",
    "{^} is what?",
    "Do you know what {} is?",
    "Say what {} is.",
    "I need to know {}.",
    "Can you say what {} is?",
    "Tell me what {} is.",
    "Please give me {}.",
    "What would {} be?",
)
PREFIXES = (
    "Hello! ",
    "Hi, ",
    "Hey! ",
    "Excuse me, ",
    "Quick question: ",
    "Good morning! ",
    "Thanks! ",
    "Okay, ",
    "One more question: ",
    "And now: ",
    "Next question: ",
    "Great! ",
)
SUFFIXES = (" Thanks!", " Thank you.", " Please be short.")
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer in one sentence.",
    "Answer briefly.",
    "You are Kimi, an AI assistant created by Moonshot AI.",
    "Be short and exact.",
    "You are a friendly teacher.",
    "You are a small demo model.",
    "Answer every question with one short sentence.",
)


@dataclass(frozen=True)
class Fact:
    kind: str
    phrases: tuple[str, ...]
    answer: str
    questions: tuple[str, ...] = field(default=())
    lower: bool = True  # the question may be written in lower case


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


class _Table(dict[str, list[Fact]]):
    """Facts by kind, in the order in which they are added."""

    def add(self, kind: str, phrases: tuple[str, ...], answer: str, *questions: str, lower: bool = True) -> None:
        self.setdefault(kind, []).append(Fact(kind, phrases, answer, questions, lower))


def _geography(t: _Table) -> None:
    for country, city in F.CAPITALS:
        t.add(
            "capital",
            (f"the capital of {country}", f"the capital city of {country}", f"{country}'s capital"),
            f"The capital of {country} is {city}.",
            f"Which city is the capital of {country}?",
            f"What city is the capital of {country}?",
            f"Name the capital of {country}.",
        )
        t.add(
            "country",
            (
                f"the country whose capital is {city}",
                f"the country with the capital {city}",
                f"the country that has the capital {city}",
            ),
            f"{city} is the capital of {country}.",
            f"{city} is the capital of which country?",
            f"Which country has the capital {city}?",
        )


def _arithmetic(t: _Table) -> None:
    for a in range(21):
        for b in range(21):
            t.add(
                "addition",
                (f"{a} plus {b}", f"{a} + {b}", f"the sum of {a} and {b}"),
                f"{a} plus {b} is {a + b}.",
                f"How much is {a} plus {b}?",
                f"How much is {a} + {b}?",
                f"{a} + {b} =",
                f"Add {a} and {b}.",
            )
            if b <= a:
                t.add(
                    "subtraction",
                    (f"{a} minus {b}", f"{a} - {b}", f"{a} take away {b}"),
                    f"{a} minus {b} is {a - b}.",
                    f"How much is {a} minus {b}?",
                    f"{a} - {b} =",
                    f"Take {b} away from {a}.",
                )
            if a <= 10 and b <= 10:
                t.add(
                    "multiplication",
                    (f"{a} times {b}", f"{a} x {b}", f"the product of {a} and {b}"),
                    f"{a} times {b} is {a * b}.",
                    f"How much is {a} times {b}?",
                    f"{a} x {b} =",
                    f"Multiply {a} by {b}.",
                )
            if a != b:
                t.add(
                    "comparison",
                    (f"the larger number, {a} or {b}", f"the bigger number of {a} and {b}"),
                    f"{max(a, b)} is larger than {min(a, b)}.",
                    f"Which is larger, {a} or {b}?",
                    f"Which number is bigger, {a} or {b}?",
                )


def _calendar(t: _Table) -> None:
    for i, day in enumerate(F.DAYS):
        after, before = F.DAYS[(i + 1) % 7], F.DAYS[(i - 1) % 7]
        t.add(
            "days",
            (f"the day after {day}", f"the day that comes after {day}", f"the day that follows {day}"),
            f"The day after {day} is {after}.",
            f"Which day comes after {day}?",
            f"Today is {day}. What day is tomorrow?",
        )
        t.add(
            "days",
            (f"the day before {day}", f"the day that comes before {day}"),
            f"The day before {day} is {before}.",
            f"Which day comes before {day}?",
            f"Today is {day}. What day was yesterday?",
        )
    for i, month in enumerate(F.MONTHS):
        after, before = F.MONTHS[(i + 1) % 12], F.MONTHS[(i - 1) % 12]
        t.add(
            "months",
            (f"the month after {month}", f"the month that comes after {month}"),
            f"The month after {month} is {after}.",
            f"Which month comes after {month}?",
        )
        t.add(
            "months",
            (f"the month before {month}", f"the month that comes before {month}"),
            f"The month before {month} is {before}.",
            f"Which month comes before {month}?",
        )
        t.add(
            "months",
            (f"the number of days in {month}", f"the length of {month} in days"),
            f"{month} has {F.MONTH_DAYS[i]} days.",
            f"How many days does {month} have?",
            f"How many days are in {month}?",
        )
        t.add(
            "months",
            (f"the {F.ORDINALS[i]} month", f"the {F.ORDINALS[i]} month of the year"),
            f"The {F.ORDINALS[i]} month is {month}.",
            f"Which month is the {F.ORDINALS[i]} month?",
        )


def _letters(t: _Table) -> None:
    for i, letter in enumerate(F.LETTERS):
        if i < 25:
            t.add(
                "letters",
                (f"the letter after {letter}", f"the letter that comes after {letter}"),
                f"The letter after {letter} is {F.LETTERS[i + 1]}.",
                f"Which letter comes after {letter}?",
                lower=False,
            )
        if i:
            t.add(
                "letters",
                (f"the letter before {letter}", f"the letter that comes before {letter}"),
                f"The letter before {letter} is {F.LETTERS[i - 1]}.",
                f"Which letter comes before {letter}?",
                lower=False,
            )


def _words(t: _Table) -> None:
    for pair in F.OPPOSITES:
        for x, y in (pair, pair[::-1]):
            t.add(
                "opposites",
                (f"the opposite of {x}", f"the opposite of the word {x}", f'the opposite of "{x}"'),
                f"The opposite of {x} is {y}.",
                f"Which word is the opposite of {x}?",
                f"{x} is the opposite of what?",
            )
    for x, y in F.PLURALS:
        t.add(
            "plurals",
            (f"the plural of {x}", f"the plural of the word {x}", f'the plural of "{x}"', f"the plural form of {x}"),
            f"The plural of {x} is {y}.",
            f"One {x}, two what?",
        )
    for x, y in F.PASTS:
        t.add(
            "past tense",
            (
                f"the past tense of {x}",
                f"the past tense of the verb {x}",
                f'the past tense of "{x}"',
                f"the past form of {x}",
            ),
            f"The past tense of {x} is {y}.",
        )


def _nature(t: _Table) -> None:
    for x, y in F.SOUNDS:
        art = "an" if x[0] in "aeiou" else "a"
        t.add(
            "animals",
            (f"the sound of {art} {x}", f"the sound that {art} {x} makes"),
            f"{art.capitalize()} {x} says {y}.",
            f"What does {art} {x} say?",
            f"Which sound does {art} {x} make?",
            f"What sound does {art} {x} make?",
        )
    for x, y in F.YOUNG:
        art = "an" if x[0] in "aeiou" else "a"
        t.add(
            "animals",
            (f"the name of a young {x}", f"the word for a young {x}"),
            f"A young {x} is called a {y}." if y[0] not in "aeiou" else f"A young {x} is called an {y}.",
            f"What is a young {x} called?",
            f"How do you call a young {x}?",
            f"What do you call the young of {art} {x}?",
        )
    for thing, has, colour in F.COLOURS:
        t.add(
            "colours",
            (f"the colour of {thing}", f"the color of {thing}"),
            f"{has} {colour}.",
            f"What colour is {thing}?",
            f"What color is {thing}?",
            f"Which colour does {thing} have?",
        )
    for element, symbol in F.ELEMENTS:
        t.add(
            "elements",
            (f"the symbol for {element}", f"the chemical symbol of {element}", f"the symbol of {element}"),
            f"The symbol for {element} is {symbol}.",
            f"Which symbol stands for {element}?",
        )


def _measures(t: _Table) -> None:
    for n in range(101):
        word = F.number_word(n)
        t.add(
            "number words",
            (f"{n} in words", f"the number {n} in words", f"the word for {n}"),
            f"{n} in words is {word}.",
            f"How do you write {n} in words?",
            f"Write {n} in words.",
        )
        t.add(
            "number words",
            (f"{word} in digits", f"the number {word} in digits"),
            f"{upper_first(word)} in digits is {n}.",
            f"How do you write {word} in digits?",
            f"Write {word} in digits.",
        )
    for many, one, factor in F.UNITS:
        for n in range(1, 11):
            large = f"{n} {one if n == 1 else F.UNIT_PLURALS.get(one, one + 's')}"
            t.add(
                "units",
                (f"{large} in {many}", f"the number of {many} in {large}"),
                f"{large} is {n * factor} {many}." if n == 1 else f"{large} are {n * factor} {many}.",
                f"How many {many} are in {large}?",
                f"How many {many} are there in {large}?",
                f"Convert {large} to {many}.",
            )


def _kinds() -> _Table:
    table = _Table()
    for part in (_geography, _arithmetic, _calendar, _letters, _words, _nature, _measures):
        part(table)
    return table


KINDS = _kinds()
KIND_NAMES = tuple(KINDS)
# How often a kind is drawn, about in proportion to what there is to learn.
WEIGHTS = {
    "capital": 16,
    "country": 12,
    "addition": 16,
    "subtraction": 11,
    "multiplication": 9,
    "comparison": 4,
    "days": 3,
    "months": 5,
    "letters": 4,
    "opposites": 6,
    "plurals": 4,
    "past tense": 5,
    "animals": 4,
    "colours": 3,
    "elements": 3,
    "number words": 6,
    "units": 6,
}


def held_out(kind: str, opener: int, phrase: int) -> bool:
    """True for the wordings which are never used in training."""
    return (opener + 3 * phrase + KIND_NAMES.index(kind)) % 5 == 0


def word(opener: int, phrase: str) -> str:
    """One opener around one noun phrase."""
    return OPENERS[opener].replace("{^}", upper_first(phrase)).replace("{}", phrase)


def style(rng: random.Random, text: str, lower: bool, amount: float = 1.0) -> str:
    """Vary greeting, case and end mark of a question."""
    if rng.random() < 0.22 * amount:
        prefix = rng.choice(PREFIXES)
        if not prefix.rstrip().endswith("!") and not text[:2].isupper() and text.split(" ")[0] in _PLAIN_STARTS:
            text = text[:1].lower() + text[1:]
        text = prefix + text
    if lower and rng.random() < 0.2 * amount:
        text = text.lower()
    roll = rng.random()
    if roll < 0.12 * amount:
        text = text.rstrip("?.")
    elif roll < 0.16 * amount and text.endswith("?"):
        text += "?"
    elif roll < 0.22 * amount and text[-1] in "?.":
        text += rng.choice(SUFFIXES)
    return text


_PLAIN_STARTS = {o.split(" ")[0] for o in OPENERS if not o.startswith("{")} | {"Which", "How", "Name", "Write"}


def ask(rng: random.Random, fact: Fact) -> str:
    """The fact's question in a training wording."""
    if fact.questions and rng.random() < 0.25:
        return style(rng, upper_first(rng.choice(fact.questions)), fact.lower)
    while True:
        opener, phrase = rng.randrange(len(OPENERS)), rng.randrange(len(fact.phrases))
        if not held_out(fact.kind, opener, phrase):
            return style(rng, word(opener, fact.phrases[phrase]), fact.lower)


def draw_fact(rng: random.Random, weights: dict[str, float] | None = None) -> Fact:
    table = weights or WEIGHTS
    return rng.choice(KINDS[rng.choices(KIND_NAMES, [table[k] for k in KIND_NAMES])[0]])
