#!/usr/bin/env python3
"""The demo corpus: chats about things that can be checked, generated from a seed.

    python tools/demo/corpus.py --show 5             # a few training conversations
    python tools/demo/corpus.py --write tests/data/demo_questions.json

Every fact is a `Fact`: a kind, noun phrases that name what is asked ("the capital of France"), whole questions that
suit only this kind, and one exact answer. A *wording* is an opener of `OPENERS` around the noun phrase of one index.
`held_out(kind, opener, phrase)` sets a fifth of all wordings of a kind aside: they are never used for training, while
every opener, every phrase form and every fact is. The held-out questions are asked in those wordings only.

A conversation is a list of messages ``{"role", "content"}``; `segments` cuts it into the pieces which are tokenised
one by one. Only the standard library is used.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import facts as F  # noqa: E402

Message = dict[str, str]

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


def _upper_first(text: str) -> str:
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
            f"{_upper_first(word)} in digits is {n}.",
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
    return OPENERS[opener].replace("{^}", _upper_first(phrase)).replace("{}", phrase)


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
        return style(rng, _upper_first(rng.choice(fact.questions)), fact.lower)
    while True:
        opener, phrase = rng.randrange(len(OPENERS)), rng.randrange(len(fact.phrases))
        if not held_out(fact.kind, opener, phrase):
            return style(rng, word(opener, fact.phrases[phrase]), fact.lower)


def draw_fact(rng: random.Random, weights: dict[str, float] | None = None) -> Fact:
    table = weights or WEIGHTS
    return rng.choice(KINDS[rng.choices(KIND_NAMES, [table[k] for k in KIND_NAMES])[0]])


# ------------------------------------------------------------------------------------------ what was said before
_SYLLABLES = (
    "ba be bo da de do fa fi ga go ka ke ki la le li lo ma me mi mo na ne ni no pa pe ra re ri ro sa se si so "
    "ta te ti to va ve vi wa ya yo za ze"
).split()


def _name(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(F.NAMES)
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 4))).capitalize() + rng.choice(
        ("", "", "n", "r", "s", "l", "x")
    )


def _article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


@dataclass(frozen=True)
class Topic:
    """Something the user says about himself and asks for later."""

    key: str
    tell: tuple[str, ...]
    reply: str
    phrases: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str
    unknown: str


TOPICS = (
    Topic(
        "name",
        (
            "My name is {}.",
            "I am {}.",
            "I'm {}.",
            "Hello, my name is {}.",
            "Hi, I am {}.",
            "Hi! I'm {}.",
            "Call me {}.",
            "Please call me {}.",
            "Hello! I am {}.",
            "My name's {}.",
            "Hey, my name is {}.",
            "Good morning, I am {}.",
            "Hi, my name is {}.",
        ),
        "Nice to meet you, {}.",
        ("my name",),
        (
            "Who am I?",
            "Do you remember my name?",
            "What am I called?",
            "How am I called?",
            "What was my name?",
            "Do you still know my name?",
        ),
        "Your name is {}.",
        "You have not told me your name.",
    ),
    Topic(
        "colour",
        (
            "My favourite colour is {}.",
            "I like the colour {}.",
            "My favorite color is {}.",
            "I love the colour {}.",
            "The colour I like most is {}.",
        ),
        "{} is a nice colour.",
        ("my favourite colour", "my favorite color"),
        (
            "Which colour do I like?",
            "What colour do I like?",
            "Do you remember my favourite colour?",
            "Which is my favourite colour?",
        ),
        "Your favourite colour is {}.",
        "You have not told me your favourite colour.",
    ),
    Topic(
        "pet",
        ("I have {}.", "My pet is {}.", "I have {} at home.", "I own {}.", "At home I have {}."),
        "{} is a good pet.",
        ("my pet", "the pet I have"),
        ("Which pet do I have?", "What pet do I have?", "Do you remember my pet?", "Which animal do I have?"),
        "Your pet is {}.",
        "You have not told me your pet.",
    ),
    Topic(
        "city",
        ("I live in {}.", "My home is {}.", "I come from {}.", "My city is {}.", "I am from {}."),
        "{} is a nice place.",
        ("my city", "my home"),
        ("Where do I live?", "Which city do I live in?", "Do you remember my city?", "Where am I from?"),
        "You live in {}.",
        "You have not told me your city.",
    ),
)


def _value(rng: random.Random, topic: Topic) -> str:
    if topic.key == "name":
        return _name(rng)
    if topic.key == "colour":
        return rng.choice(F.FAVOURITES)
    if topic.key == "pet":
        return _article(rng.choice(F.PETS))
    return rng.choice(F.CAPITALS)[1]


def _tell(rng: random.Random, topic: Topic, value: str) -> list[Message]:
    said = rng.choice(topic.tell).format(value)
    if rng.random() < 0.1:
        said = said.rstrip(".")
    return [_user(said), _assistant(_upper_first(topic.reply.format(value)))]


def topic_held_out(topic: int, opener: int, phrase: int) -> bool:
    return (opener + 2 * phrase + topic) % 5 == 0


def _recall(rng: random.Random, topic: Topic, value: str | None) -> list[Message]:
    answer = topic.unknown if value is None else topic.answer.format(value)
    if rng.random() < 0.4:
        question = rng.choice(topic.questions)
    else:
        while True:
            opener, phrase = rng.randrange(len(OPENERS)), rng.randrange(len(topic.phrases))
            if not topic_held_out(TOPICS.index(topic), opener, phrase):
                break
        question = word(opener, topic.phrases[phrase])
    return [_user(style(rng, question, True)), _assistant(answer)]


# ------------------------------------------------------------------------------------------ small talk
GREETINGS = (
    "hello",
    "hi",
    "hey",
    "hello there",
    "hi there",
    "good morning",
    "good evening",
    "good afternoon",
    "good day",
    "hey there",
)
SMALL_TALK = (
    (tuple(GREETINGS), "Hello! How can I help you?"),
    (
        (
            "thanks",
            "thank you",
            "thank you very much",
            "many thanks",
            "thanks a lot",
            "great, thanks",
            "okay, thanks",
            "thank you so much",
        ),
        "You are welcome!",
    ),
    (
        (
            "who are you",
            "what are you",
            "who am I talking to",
            "tell me who you are",
            "what is your name",
            "what's your name",
            "introduce yourself",
            "please tell me who you are",
        ),
        "I am a small Kimi-Linear model that runs in warp_embed.",
    ),
    (("how are you", "how do you do", "how are you today", "how is it going"), "I am fine, thank you. And you?"),
    (
        ("what can you do", "how can you help me", "what do you know", "what can I ask you", "what can you tell me"),
        "I know capitals, numbers, days, months, units and words.",
    ),
    (("bye", "goodbye", "see you", "bye bye", "good night", "see you later", "goodbye for now"), "Goodbye!"),
)
_MARKS = {0: ".!", 1: ".!", 2: "?", 3: "?", 4: "?", 5: ".!"}


def talk_held_out(group: int, phrase: int, form: int) -> bool:
    """Small talk: a wording is a greeting in front of a phrase; a fifth of these pairs is never trained."""
    return group > 1 and (phrase + 2 * form + group) % 5 == 0


def _small_talk(rng: random.Random) -> list[Message]:
    while True:
        group = rng.randrange(len(SMALL_TALK))
        phrases, answer = SMALL_TALK[group]
        phrase = rng.randrange(len(phrases))
        form = rng.randrange(-len(GREETINGS), len(GREETINGS)) if group > 1 else -1
        if form < 0 or not talk_held_out(group, phrase, form):
            break
    return [_user(_talk(rng, group, phrase, form)), _assistant(answer)]


def _talk(rng: random.Random, group: int, phrase: int, form: int) -> str:
    text = SMALL_TALK[group][0][phrase]
    if form >= 0:
        text = GREETINGS[form] + rng.choice((", ", "! ", ". ")) + text
    if rng.random() < 0.75:
        text = _upper_first(text)
    return text + rng.choice(("", _MARKS[group][0], _MARKS[group][-1]))


# ------------------------------------------------------------------------------------------ conversations
def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def conversation(rng: random.Random, weights: dict[str, float] | None = None, single: float = 0.45) -> list[Message]:
    """One training conversation of one to seven exchanges."""
    messages: list[Message] = []
    if rng.random() < 0.15:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    known: dict[str, str] = {}
    turns = 1 if rng.random() < single else rng.randint(2, 7)
    remembers = turns > 1 and rng.random() < 0.6
    for turn in range(turns):
        roll = rng.random()
        if remembers and (turn == 0 or roll < 0.15):
            topic = rng.choice(TOPICS) if rng.random() < 0.5 else TOPICS[0]
            if topic.key not in known:
                known[topic.key] = _value(rng, topic)
                messages += _tell(rng, topic, known[topic.key])
                continue
        if known and (roll < 0.35 or turn == turns - 1):
            key = rng.choice(list(known))
            messages += _recall(rng, next(t for t in TOPICS if t.key == key), known[key])
        elif roll < 0.37 and turns > 1 or roll < 0.01:
            topic = rng.choice(TOPICS)
            messages += _recall(rng, topic, known.get(topic.key))
        elif roll < 0.43:
            messages += _small_talk(rng)
        else:
            fact = draw_fact(rng, weights)
            messages += [_user(ask(rng, fact)), _assistant(fact.answer)]
    return messages


def training(seed: int, weights: dict[str, float] | None = None, single: float = 0.45) -> Iterator[list[Message]]:
    """Endless training conversations."""
    rng = random.Random(seed)
    while True:
        yield conversation(rng, weights, single)


def wording(text: str) -> str:
    """A question without its case and punctuation: what makes two questions the same words."""
    return re.sub(r"[^\w+*/ -]", "", text.casefold())


def _unseen(kind: str, fact: Fact) -> list[tuple[int, int]]:
    """The held-out wordings of a fact that no training wording happens to spell, too."""
    every = [(o, p) for o in range(len(OPENERS)) for p in range(len(fact.phrases))]
    trained = {wording(word(o, fact.phrases[p])) for o, p in every if not held_out(kind, o, p)}
    trained |= {wording(question) for question in fact.questions}
    return [(o, p) for o, p in every if held_out(kind, o, p) and wording(word(o, fact.phrases[p])) not in trained]


def all_held_out(per_kind: int = 24, seed: int = 1) -> list[dict]:
    """The held-out questions: ``{"kind", "messages", "answer"}``, `per_kind` of every kind, no question twice.

    ``messages`` ends with the user's question. Kind "memory" has earlier turns in which the user says what is asked.
    """
    rng = random.Random(seed)
    out: list[dict] = []
    for kind, table in KINDS.items():
        seen: set[str] = set()
        left = list(table)
        while len(seen) < per_kind:
            if not left:
                left = list(table)
            fact = left.pop(rng.randrange(len(left)))
            opener, phrase = rng.choice(_unseen(kind, fact))
            text = style(rng, word(opener, fact.phrases[phrase]), fact.lower, amount=0.5)
            if text not in seen:
                seen.add(text)
                out.append({"kind": kind, "messages": [_user(text)], "answer": fact.answer})
    seen = set()
    while len(seen) < per_kind:
        group = rng.randrange(2, len(SMALL_TALK))
        phrase, form = rng.randrange(len(SMALL_TALK[group][0])), rng.randrange(len(GREETINGS))
        text = _talk(rng, group, phrase, form)
        if talk_held_out(group, phrase, form) and text not in seen:
            seen.add(text)
            out.append({"kind": "small talk", "messages": [_user(text)], "answer": SMALL_TALK[group][1]})
    for i in range(2 * per_kind):
        index = 0 if i % 2 else rng.randrange(len(TOPICS))
        topic = TOPICS[index]
        value = _value(rng, topic)
        messages = _tell(rng, topic, value)
        for _ in range(rng.randint(0, 4)):
            fact = draw_fact(rng)
            messages += [_user(ask(rng, fact)), _assistant(fact.answer)]
        options = [
            (o, p) for o in range(len(OPENERS)) for p in range(len(topic.phrases)) if topic_held_out(index, o, p)
        ]
        opener, phrase = rng.choice(options)
        messages.append(_user(style(rng, word(opener, topic.phrases[phrase]), True, amount=0.5)))
        out.append({"kind": "memory", "messages": messages, "answer": topic.answer.format(value)})
    return out


# ------------------------------------------------------------------------------------------ chat format
IM_END, IM_USER, IM_ASSISTANT, IM_SYSTEM, IM_MIDDLE = (
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
)
_OPENER = {"user": IM_USER, "assistant": IM_ASSISTANT, "system": IM_SYSTEM}


def segments(messages: list[Message], generate: bool = False) -> list[tuple[str, str, bool]]:
    """``(sort, text, learn)`` with sort "markup" or "text"; `learn` marks what the assistant has to produce."""
    out: list[tuple[str, str, bool]] = []
    for m in messages:
        mine = m["role"] == "assistant"
        out += [
            ("markup", f"{_OPENER[m['role']]}{m['role']}{IM_MIDDLE}", False),
            ("text", m["content"], mine),
            ("markup", IM_END, mine),
        ]
    if generate:
        out.append(("markup", f"{IM_ASSISTANT}assistant{IM_MIDDLE}", False))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--show", type=int, default=0, help="print this many training conversations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="write the held-out questions as JSON")
    args = parser.parse_args()
    source = training(args.seed)
    for _ in range(args.show):
        print("\n".join(f"{m['role']:>9}: {m['content']}" for m in next(source)), end="\n\n")
    if args.write:
        rows = ",\n".join(json.dumps(q, ensure_ascii=False) for q in all_held_out())
        args.write.write_text(f"[\n{rows}\n]\n", encoding="utf-8")
    print({k: len(v) for k, v in KINDS.items()}, file=sys.stderr)


if __name__ == "__main__":
    main()
