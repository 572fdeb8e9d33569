"""Everything this package raises on purpose. Read errors stay OSError, wrong arguments TypeError or ValueError."""
from __future__ import annotations


class WarpError(Exception):
    """Base of all of them. Keyword arguments become attributes: the fields a program needs."""

    def __init__(self, message: str = "", **fields: object) -> None:
        super().__init__(message)
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return None                     # a field that this occasion does not have


class FormatError(WarpError, ValueError):
    """A container or checkpoint is malformed: ``.file``, ``.field``, ``.layer``, ``.expert`` where they apply."""


class RecordError(FormatError):
    """One expert record is damaged: ``.file``, ``.layer``, ``.expert``, ``.offset`` (bytes), ``.field``."""


class UnsupportedModel(WarpError, ValueError):
    """A well-formed model that this version cannot run: ``.field`` says what it would need."""


class BudgetError(WarpError, MemoryError):
    """The memory allowed is below the plan's floor: ``.needed_bytes``, ``.budget_bytes``."""


class StateError(WarpError, ValueError):
    """A session is in the wrong state for the call, or a state file does not fit: ``.field``."""


class ContextFull(WarpError, ValueError):
    """The tokens do not fit in the context; nothing was done: ``.position``, ``.context``, ``.needed``."""


class SessionBusy(WarpError, RuntimeError):
    """Another thread is using this session."""


class SessionClosed(WarpError, RuntimeError):
    """The session or its model was closed."""


class Cancelled(WarpError):
    """cancel() was called; the session is at its last committed token."""


class ToolCallError(WarpError, ValueError):
    """The model began calls of tools that are not well formed or not complete: ``.raw``, what it wrote.

    It is handed out with the reply, not raised: the rest of the reply is good.
    """


class NumericError(WarpError, ArithmeticError):
    """A result is not finite: ``.layer`` where it is known."""


class ForkedError(WarpError, RuntimeError):
    """The model was opened before fork(); open it again in the child."""
