"""What a reply consists of, as it comes: text, thinking, calls of tools."""
from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from warp_embed.errors import ToolCallError

if TYPE_CHECKING:
    from warp_embed.runtime.generation import Clock

Argument = tuple[str | None, str, str]      # key, type and text as written; no key: all arguments as one object


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer: whole characters."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call of a tool.

    Attributes
    ----------
    id : str
        Tells it from the other calls of the same reply.
    name : str
        As the model wrote it: perhaps no tool that there is.
    arguments : dict
        Values of the types that the model gave them; not checked against the tool's schema.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    written: tuple[Argument, ...] = field(default=(), repr=False, compare=False)


Event = Content | Reasoning | ToolCall | ToolCallError


def texts(events: Generator[Event | None, None, None]) -> Iterator[str]:
    """The pieces of the answer."""
    with contextlib.closing(events):
        for event in events:
            if isinstance(event, Content):
                yield event.text


def by_the_clock(events: Generator[Event | None, None, None], clock: Clock) -> Iterator[str]:
    """Pieces of text, one each time that the clock's time is over."""
    text = ""
    clock.start()
    with contextlib.closing(events):
        for event in events:
            if isinstance(event, Content):
                text += event.text
            if event is None or clock.over:
                yield text
                text = ""
                clock.start()
    if text:
        yield text
