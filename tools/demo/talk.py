"""What is said in the demo corpus besides questions about facts: the user about himself, and small talk."""
from __future__ import annotations

import random
from dataclasses import dataclass

import facts as F
from questions import OPENERS, style, upper_first, word

Message = dict[str, str]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


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


def value_of(rng: random.Random, topic: Topic) -> str:
    if topic.key == "name":
        return _name(rng)
    if topic.key == "colour":
        return rng.choice(F.FAVOURITES)
    if topic.key == "pet":
        return _article(rng.choice(F.PETS))
    return rng.choice(F.CAPITALS)[1]


def tell(rng: random.Random, topic: Topic, value: str) -> list[Message]:
    said = rng.choice(topic.tell).format(value)
    if rng.random() < 0.1:
        said = said.rstrip(".")
    return [user(said), assistant(upper_first(topic.reply.format(value)))]


def topic_held_out(topic: int, opener: int, phrase: int) -> bool:
    return (opener + 2 * phrase + topic) % 5 == 0


def recall(rng: random.Random, topic: Topic, value: str | None) -> list[Message]:
    answer = topic.unknown if value is None else topic.answer.format(value)
    if rng.random() < 0.4:
        question = rng.choice(topic.questions)
    else:
        while True:
            opener, phrase = rng.randrange(len(OPENERS)), rng.randrange(len(topic.phrases))
            if not topic_held_out(TOPICS.index(topic), opener, phrase):
                break
        question = word(opener, topic.phrases[phrase])
    return [user(style(rng, question, True)), assistant(answer)]


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


def small_talk(rng: random.Random) -> list[Message]:
    while True:
        group = rng.randrange(len(SMALL_TALK))
        phrases, answer = SMALL_TALK[group]
        phrase = rng.randrange(len(phrases))
        form = rng.randrange(-len(GREETINGS), len(GREETINGS)) if group > 1 else -1
        if form < 0 or not talk_held_out(group, phrase, form):
            break
    return [user(talk(rng, group, phrase, form)), assistant(answer)]


def talk(rng: random.Random, group: int, phrase: int, form: int) -> str:
    text = SMALL_TALK[group][0][phrase]
    if form >= 0:
        text = GREETINGS[form] + rng.choice((", ", "! ", ". ")) + text
    if rng.random() < 0.75:
        text = upper_first(text)
    return text + rng.choice(("", _MARKS[group][0], _MARKS[group][-1]))
