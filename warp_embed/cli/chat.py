"""Talk to a model.

Lines from the terminal, or from stdin, are questions; Ctrl-C ends a reply. What a model thinks is shown on a terminal
only. Lines that are commands:
  /retry         answer the last question once more
  /edit N TEXT   ask TEXT in place of question N (1 is the first); what followed is forgotten
  /save FILE     write the conversation to a file
  /restore FILE  go on with one
  /quit          as Ctrl-D
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from warp_embed.cli.common import (
    add_memory_options,
    add_model,
    add_sampling_options,
    open_model,
    sampling,
    show,
    spent,
)
from warp_embed.errors import StateError, WarpError
from warp_embed.runtime.events import Content, Event, Reasoning

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from warp_embed import Chat, Model
    from warp_embed.runtime.chatcore import AskOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parser.add_argument("--effort", choices=("low", "high", "max", "off"), help="how much to think, if it can")
    add_sampling_options(parser)
    add_memory_options(parser)


def run(args: argparse.Namespace) -> int:
    choice = sampling(args)
    with open_model(args) as model:
        chat = model.chat(system=args.system)
        for line in questions():
            command, _, rest = line.partition(" ")
            if command == "/quit":
                break
            try:
                if command == "/save":
                    save(chat, rest.strip())
                elif command == "/restore":
                    chat = restore(model, chat, rest.strip())
                else:
                    answer(chat, reply(chat, line, max_tokens=args.max_tokens, sampling=choice, stop=args.stop,
                                       effort=args.effort), args)
            except BrokenPipeError:
                raise
            except (WarpError, OSError, ValueError) as error:
                print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 0


def questions() -> Iterator[str]:
    """Lines that are not empty."""
    terminal = sys.stdin.isatty()
    if terminal:
        try:
            import readline  # noqa: F401  (line editing for input())
        except ImportError:
            pass
    while True:
        try:
            line = input("> ") if terminal else sys.stdin.readline()
        except EOFError:
            print()
            return
        if not terminal and not line:
            return
        if line.strip():
            yield line.strip()


def reply(chat: Chat, line: str, **options: Unpack[AskOptions]) -> Iterator[Event | None]:
    """The answer that a line wants."""
    command, _, rest = line.partition(" ")
    if command == "/retry":
        return chat.events(retry=True, **options)
    if command == "/edit":
        number, _, text = rest.strip().partition(" ")
        asked = [i for i, message in enumerate(chat.messages) if message["role"] == "user"]
        if not number.isdecimal() or not 1 <= int(number) <= len(asked) or not text:
            raise ValueError(f"/edit needs the number of a question, 1 to {len(asked)}, and a text")
        return chat.events(text, edit=asked[int(number) - 1], **options)
    if command.startswith("/") and command.isascii() and command[1:].isalpha():
        raise ValueError(f"no command {command}; there are /retry, /edit N TEXT, /save FILE, /restore FILE and /quit")
    return chat.events(line, **options)


def answer(chat: Chat, events: Iterator[Event | None], args: argparse.Namespace) -> None:
    thinking = False
    try:
        for event in events:
            if isinstance(event, Reasoning) and sys.stdout.isatty():
                show(event.text, "2")
                thinking = True
            elif isinstance(event, Content):
                show("\n\n" * thinking + event.text)
                thinking = False
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    print()
    if args.verbose:
        print(f"{spent(chat.reply)}; ended by {chat.finish_reason or 'you'}", file=sys.stderr)


def save(chat: Chat, file: str) -> None:
    if not file:
        raise ValueError("/save needs a file name")
    chat.save(file)
    print(f"saved {chat.session.position} tokens to {file}")


def restore(model: Model, chat: Chat, file: str) -> Chat:
    """A saved chat, or the chat of a saved session, in place of `chat`, which is closed."""
    from warp_embed import Chat
    if not file:
        raise ValueError("/restore needs a file name")
    try:
        saved = Chat.restore(model, file)
    except StateError as error:
        if error.field != "note":
            raise
        saved = Chat.from_session(model.restore(file))
    chat.close()
    print(f"restored {saved.session.position} tokens from {file}")
    return saved
