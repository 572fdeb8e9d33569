"""Run a mixture-of-experts language model inside your Python program, within the memory you allow.

    from warp_embed import Model
    with Model.open("model.waste") as model, model.session() as session:
        for token in session.generate("Why is the sky blue?", max_tokens=64):
            print(token.text, end="")
"""
from __future__ import annotations

import logging as _logging
import os as _os

try:
    from warp_embed import _kernels as _kernels
    from warp_embed import _store as _store
except ImportError as error:
    raise ImportError(
        "warp_embed's extension modules are not built. Install the package ('pip install .'), "
        "or build them in the checkout: 'python setup.py build_ext --inplace'") from error

from warp_embed.errors import (
    BudgetError,
    Cancelled,
    ContextFull,
    ForkedError,
    FormatError,
    NumericError,
    RecordError,
    SessionBusy,
    SessionClosed,
    StateError,
    ToolCallError,
    UnsupportedModel,
    WarpError,
)
from warp_embed.runtime.chat import Chat
from warp_embed.runtime.events import Content, Reasoning, ToolCall
from warp_embed.runtime.model import Model
from warp_embed.runtime.plan import MemoryPlan, plan
from warp_embed.runtime.pressure import MemoryPressure
from warp_embed.runtime.sampling import Sampling
from warp_embed.runtime.session import Session
from warp_embed.runtime.tokens import Token, TokenStats

try:
    from warp_embed._version import __version__
except ImportError:                     # a checkout that was never built
    __version__ = "0.0.0"

__all__ = [
    "BudgetError", "Cancelled", "Chat", "Content", "ContextFull", "ForkedError", "FormatError", "MemoryPlan",
    "MemoryPressure", "Model", "NumericError", "Reasoning", "RecordError", "Sampling", "Session", "SessionBusy",
    "SessionClosed", "StateError", "Token", "TokenStats", "ToolCall", "ToolCallError", "UnsupportedModel", "WarpError",
    "__version__", "demo_path", "get_include", "plan",
]

_logging.getLogger("warp_embed").addHandler(_logging.NullHandler())     # a program that wants to see it adds its own
_HERE = _os.path.dirname(_os.path.abspath(__file__))


def demo_path() -> str:
    """Path of the small trained model that is part of this package (MIT, as the code)."""
    return _os.path.join(_HERE, "demo.waste")


def get_include() -> str:
    """Folder of the C headers, to be given to a compiler with -I; they are included as "warp_embed/kernels.h"."""
    installed = _os.path.join(_HERE, "include")
    return installed if _os.path.isdir(installed) else _os.path.join(_os.path.dirname(_HERE), "include")
