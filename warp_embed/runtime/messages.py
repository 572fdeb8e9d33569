"""What a chat is made of: messages, checked."""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

_FIELDS = {                             # beside role and content, which every message has
    "system": ("name", "tools"), "user": ("name",), "assistant": ("name", "reasoning", "tool_calls"),
    "tool": ("tool", "tool_call_id"),
}
_ALIASES = {"reasoning_content": "reasoning"}


def checked(raw: Mapping[str, Any]) -> Message:
    """A message of its own, in one form; fields that are None or empty are left out.

    ``{"role": "system" | "user" | "assistant" | "tool", "content": text}``, and perhaps ``name``; of the assistant
    ``reasoning`` and ``tool_calls``, a list of ``{"id", "name", "arguments"}``; of a tool ``tool``, its name, and
    ``tool_call_id``; of the system ``tools``. The shapes of OpenAI's API are understood, too: ``reasoning_content``,
    ``{"function": {"name", "arguments"}}``.

    Raises
    ------
    TypeError, ValueError       a field is missing, of another type, unknown, or cannot be JSON.
    """
    if not isinstance(raw, Mapping):
        raise TypeError(f"a message is a mapping with role and content, not {type(raw).__name__}")
    role = raw.get("role")
    if not isinstance(role, str) or role not in _FIELDS:
        raise ValueError(f"a message's role is one of {', '.join(_FIELDS)}, not {role!r}")
    content = raw.get("content")
    message: Message = {"role": role, "content": _text("" if content is None else content, "content")}
    for key, value in raw.items():
        key = _ALIASES.get(key, key)
        if key in ("role", "content") or value is None:
            continue
        if role == "tool" and key == "name":
            key = "tool"
        if key not in _FIELDS[role]:
            raise ValueError(f"a message of the {role} has no field {key!r}")
        if key == "tools":
            value = checked_tools(value)
        elif key == "tool_calls":
            value = _calls(value)
        else:
            value = _text(value, key)
        if value:
            message[key] = value
    return message


def checked_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Declarations of tools as they are told to a model: ``{"type": "function", "function": {"name", ...}}``."""
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise TypeError("tools are a list of declarations")
    found = []
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise TypeError(f"a tool's declaration is a mapping, not {type(tool).__name__}")
        whole = tool if "function" in tool or "type" in tool else {"type": "function", "function": tool}
        inner = whole.get("function", whole)
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str) or not inner["name"]:
            raise ValueError("a tool's declaration has a name")
        found.append(as_json(whole, "tools"))
    return found


def as_json(value: Any, field: str) -> Any:
    """A copy of a JSON value; TypeError or ValueError for what is none."""
    try:
        copy = json.loads(json.dumps(_plain(value), allow_nan=False))
        json.dumps(copy, ensure_ascii=False).encode()
        return copy
    except RecursionError:
        raise ValueError(f"{field}: nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError(f"{field}: text with a lone surrogate") from None
    except (TypeError, ValueError) as error:
        raise type(error)(f"{field}: no JSON: {error}") from None


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _calls(calls: Any) -> list[dict[str, Any]]:
    if isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Sequence):
        raise TypeError("tool_calls are a list")
    found = []
    for number, call in enumerate(calls, 1):
        if not isinstance(call, Mapping):
            raise TypeError(f"a tool call is a mapping, not {type(call).__name__}")
        inner = call.get("function", call)
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str) or not inner["name"]:
            raise ValueError("a tool call has a name")
        name = _text(inner["name"], "tool_calls")
        given = call.get("id")
        found.append({"id": f"{name}:{number}" if given is None else _text(given, "tool_calls"), "name": name,
                      "arguments": _arguments(inner.get("arguments"))})
    return found


def _arguments(value: Any) -> Any:
    """A dict; or the text that was to be JSON and is not."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, str):
        _text(value, "arguments")
        try:
            parsed = json.loads(value)
            as_json(parsed, "arguments")
        except (ValueError, RecursionError):
            return value
        value = parsed
    if not isinstance(value, Mapping):
        raise ValueError(f"the arguments of a tool call are an object, not {type(value).__name__}")
    if not all(isinstance(key, str) for key in value):
        raise TypeError("the arguments of a tool call have names")
    return as_json(value, "arguments")


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{field} is text, not {type(value).__name__}")
    value.encode()                      # UnicodeEncodeError, a ValueError: a lone surrogate
    return value
