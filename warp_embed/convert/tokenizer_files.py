"""The tokenizer and chat files of a container, made from a release's or copied from another container."""
from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warp_embed.errors import FormatError
from warp_embed.runtime.fields import load_object

RANK_FILES = ("tokenizer.model", "tiktoken.model")
FILE_CAP = 256 << 20
RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?$")
MARKER = re.compile(r"<\|[^|<>]+\|>")
KIMI_LINEAR_CHAT = {
    "system": ["<|im_system|>system<|im_middle|>", "<|im_end|>"],
    "user": ["<|im_user|>user<|im_middle|>", "<|im_end|>"],
    "assistant": ["<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"],
    "open": "<|im_assistant|>assistant<|im_middle|>",
}
_K3_ANSWER = '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
# The turns of K3's XTML that need neither thinking nor tools, for readers that know only this file.
KIMI_K3_CHAT = {
    "system": ['<|open|>message role="system"<|sep|>', "<|close|>message<|sep|><|end_of_msg|>"],
    "user": ['<|open|>message role="user"<|sep|>', "<|close|>message<|sep|><|end_of_msg|>"],
    "assistant": [_K3_ANSWER, "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"],
    "open": _K3_ANSWER,
}
Chat = dict[str, Any]


@dataclass
class TokenizerFiles:
    """Contents by file name, and what the user should know."""
    files: dict[str, bytes] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def copy_from_container(directory: Path) -> TokenizerFiles:
    found = TokenizerFiles()
    _copy_ranks(directory, found)
    for name in ("specials.json", "chat.json", "chat_template.jinja"):
        if (directory / name).is_file():
            found.files[name] = _read(directory / name)
    _warn_without_ranks(found)
    return found


def make_from_checkpoint(directory: Path, chat: Chat | None) -> TokenizerFiles:
    """`chat`: the model's chat.json, if the tokenizer has its markers."""
    found = TokenizerFiles()
    _copy_ranks(directory, found)
    if (directory / "chat_template.jinja").is_file():
        found.files["chat_template.jinja"] = _read(directory / "chat_template.jinja")
    config = directory / "tokenizer_config.json"
    specials = _specials(load_object(str(config), FILE_CAP)[0], config) if config.is_file() else []
    if specials:
        found.files["specials.json"] = _specials_bytes(specials)
        if chat is not None and "tokenizer.model" in found.files:
            _add_chat(chat, specials, found)
    elif "tokenizer.model" in found.files:
        found.warnings.append("tokenizer_config.json has no added_tokens_decoder: the model's special tokens are "
                              "unknown, chat will not work and generation may not stop")
    _warn_without_ranks(found)
    return found


def _read(path: Path) -> bytes:
    if path.stat().st_size > FILE_CAP:
        raise FormatError(f"{path.name} is larger than {FILE_CAP} bytes", file=str(path))
    return path.read_bytes()


def _warn_without_ranks(found: TokenizerFiles) -> None:
    if "tokenizer.model" not in found.files:
        found.warnings.append("no tiktoken rank file (tokenizer.model): the container runs on token ids only")


def _copy_ranks(directory: Path, found: TokenizerFiles) -> None:
    for name in RANK_FILES:
        if not (directory / name).is_file():
            continue
        data = _read(directory / name)
        first = next((line for line in data[:1 << 16].split(b"\n") if line.strip()), b"")
        if RANK_LINE.match(first):
            found.files["tokenizer.model"] = data
            return
        found.warnings.append(f"{name} is not a tiktoken rank file and was left out")


def _specials(document: dict[str, Any], path: Path) -> list[tuple[int, str]]:
    """(id, text) of every added token, sorted by id."""
    decoder = document.get("added_tokens_decoder")
    if decoder is None:
        return []

    def refuse(what: str) -> FormatError:
        return FormatError(f"{path.name}: added_tokens_decoder: {what}", file=str(path), field="added_tokens_decoder")

    if not isinstance(decoder, dict):
        raise refuse("not an object")
    found: dict[int, str] = {}
    for key, token in decoder.items():
        text = token.get("content") if isinstance(token, dict) else None
        if not re.fullmatch(r"[0-9]{1,10}", key) or int(key) >= 1 << 31 or int(key) in found:
            raise refuse(f"{key!r} is no id, or is there twice")
        if not isinstance(text, str) or not text:
            raise refuse(f"token {key} has no text")
        # Readers of this file do not unescape, so a string that JSON must escape would be another string to them.
        if json.dumps(text, ensure_ascii=False) != f'"{text}"' or re.search("[\ud800-\udfff]", text):
            raise refuse(f"token {key}, {text!r}, cannot be written without escapes")
        found[int(key)] = text
    if len(set(found.values())) != len(found):
        raise refuse("two ids have the same text")
    return sorted(found.items())


def _specials_bytes(specials: list[tuple[int, str]]) -> bytes:
    lines = ",\n".join(json.dumps({"id": number, "text": text}, ensure_ascii=False) for number, text in specials)
    return f"[\n{lines}\n]\n".encode()


def _add_chat(chat: Chat, specials: list[tuple[int, str]], found: TokenizerFiles) -> None:
    document = json.dumps(chat, indent=1, ensure_ascii=False)
    lacking = sorted(set(MARKER.findall(document)) - {text for _, text in specials})
    if lacking:
        found.warnings.append(f"no chat.json: the tokenizer has no special token {lacking[0]}")
    else:
        found.files["chat.json"] = (document + "\n").encode()
