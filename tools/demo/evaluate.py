#!/usr/bin/env python3
"""How many held-out questions the shipped demo model answers exactly right, by kind.

    python tools/demo/evaluate.py [CONTAINER] [--wrong]

The questions (tests/data/demo_questions.json) are worded in ways that training never used. An answer counts when every
character is right. The container defaults to the one in the package; --wrong also lists what it got wrong.
"""
from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import warp_embed

QUESTIONS = Path(__file__).resolve().parents[2] / "tests" / "data" / "demo_questions.json"


@dataclass(frozen=True)
class Answer:
    kind: str
    question: str
    wanted: str
    given: str

    @property
    def right(self) -> bool:
        return self.given == self.wanted


def answers(container: str) -> list[Answer]:
    """The model's greedy answers to all held-out questions, each in a conversation of its own."""
    out = []
    with warp_embed.Model.open(container, context=512) as model:
        for item in json.loads(QUESTIONS.read_text(encoding="utf-8")):
            with model.chat() as chat:
                for message in item["messages"]:
                    chat.add(**message)
                text = "".join(chat.ask(max_tokens=64))
            out.append(Answer(item["kind"], item["messages"][-1]["content"], item["answer"], text))
    return out


def by_kind(given: list[Answer]) -> dict[str, tuple[int, int]]:
    """kind -> (right, asked)."""
    table: dict[str, list[bool]] = defaultdict(list)
    for answer in given:
        table[answer.kind].append(answer.right)
    return {kind: (sum(rights), len(rights)) for kind, rights in sorted(table.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("container", nargs="?", default=warp_embed.demo_path())
    parser.add_argument("--wrong", action="store_true", help="list the wrong answers")
    args = parser.parse_args()
    given = answers(args.container)
    for kind, (right, asked) in by_kind(given).items():
        print(f"{kind:16}{right:4} of{asked:4}   {right / asked:6.1%}")
    right = sum(answer.right for answer in given)
    print(f"{'all':16}{right:4} of{len(given):4}   {right / len(given):6.1%}")
    for answer in given:
        if args.wrong and not answer.right:
            print(f"\n{answer.kind}: {answer.question}\n  wanted  {answer.wanted}\n  given   {answer.given}")


if __name__ == "__main__":
    main()
