"""See it work: a plan, a conversation, and the conversation saved and taken up again.

Without MODEL, with the small model that is part of this package.
"""
from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warp_embed.cli.common import add_model, cache_use, open_model, show, speed, styled

if TYPE_CHECKING:
    from warp_embed import Chat, Token

QUESTIONS = ("Hello, my name is Clara.", "What is the capital of France?", "What is the opposite of hot?",
             "What is 7 plus 5?")
LAST_QUESTION = "What is my name?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, nargs="?")


def run(args: argparse.Namespace) -> int:
    import warp_embed
    args.model = args.model or warp_embed.demo_path()
    args.memory, args.context, args.kv, args.threads = "auto", 1024, "f16", None
    args.experts_per_token = None
    print(f"warp_embed {warp_embed.__version__}: a language model inside a Python program")

    heading("What it takes, known before anything is loaded")
    plan = warp_embed.plan(args.model, context=args.context)
    print("\n".join("  " + line for line in str(plan).splitlines()))

    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "chat.state"
        heading("A conversation")
        with open_model(args) as model:
            chat = model.chat()
            tokens: list[Token] = []
            for question in QUESTIONS:
                answer(chat, question)
                tokens.extend(chat.reply)
            stats: Any = model.stats()
            note(speed(len(tokens), sum(t.stats.total_ms for t in tokens) / 1000))
            note(cache_use(stats.get("hits", 0), stats.get("misses", 0), stats.get("bytes_read", 0)))
            chat.session.save(state)
            position = chat.session.position

        heading("Saved, closed, opened again, restored, continued")
        note(f"{position} tokens in a file of {state.stat().st_size / 1000:.0f} KB")
        with open_model(args) as model:
            session = model.restore(state)
            answer(warp_embed.Chat.from_session(session), LAST_QUESTION)
            note(f"only the {session.position - position} tokens of this turn were evaluated")
    return 0


def answer(chat: Chat, question: str) -> None:
    print("  " + styled("> " + question, "2"))
    show("  ")
    for piece in chat.ask(question, max_tokens=64):
        show(piece)
    print()


def heading(text: str) -> None:
    print(f"\n{styled(text, '1')}")


def note(text: str) -> None:
    print("  " + styled(text, "2"))
