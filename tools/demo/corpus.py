#!/usr/bin/env python3
"""The demo corpus: chats about things that can be checked, generated from a seed.

    python tools/demo/corpus.py --show 5             # a few training conversations
    python tools/demo/corpus.py --write tests/data/demo_questions.json

`questions` has the facts and the ways to ask for them, `talk` what else is said. The held-out questions are asked in
wordings that training never uses.

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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from questions import KINDS, OPENERS, SYSTEMS, Fact, ask, draw_fact, held_out, style, word  # noqa: E402
from talk import (  # noqa: E402
    GREETINGS,
    SMALL_TALK,
    TOPICS,
    Message,
    assistant,
    recall,
    small_talk,
    talk,
    talk_held_out,
    tell,
    topic_held_out,
    user,
    value_of,
)


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
                known[topic.key] = value_of(rng, topic)
                messages += tell(rng, topic, known[topic.key])
                continue
        if known and (roll < 0.35 or turn == turns - 1):
            key = rng.choice(list(known))
            messages += recall(rng, next(t for t in TOPICS if t.key == key), known[key])
        elif roll < 0.37 and turns > 1 or roll < 0.01:
            topic = rng.choice(TOPICS)
            messages += recall(rng, topic, known.get(topic.key))
        elif roll < 0.43:
            messages += small_talk(rng)
        else:
            fact = draw_fact(rng, weights)
            messages += [user(ask(rng, fact)), assistant(fact.answer)]
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
                out.append({"kind": kind, "messages": [user(text)], "answer": fact.answer})
    seen = set()
    while len(seen) < per_kind:
        group = rng.randrange(2, len(SMALL_TALK))
        phrase, form = rng.randrange(len(SMALL_TALK[group][0])), rng.randrange(len(GREETINGS))
        text = talk(rng, group, phrase, form)
        if talk_held_out(group, phrase, form) and text not in seen:
            seen.add(text)
            out.append({"kind": "small talk", "messages": [user(text)], "answer": SMALL_TALK[group][1]})
    for i in range(2 * per_kind):
        index = 0 if i % 2 else rng.randrange(len(TOPICS))
        topic = TOPICS[index]
        value = value_of(rng, topic)
        messages = tell(rng, topic, value)
        for _ in range(rng.randint(0, 4)):
            fact = draw_fact(rng)
            messages += [user(ask(rng, fact)), assistant(fact.answer)]
        options = [
            (o, p) for o in range(len(OPENERS)) for p in range(len(topic.phrases)) if topic_held_out(index, o, p)
        ]
        opener, phrase = rng.choice(options)
        messages.append(user(style(rng, word(opener, topic.phrases[phrase]), True, amount=0.5)))
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
