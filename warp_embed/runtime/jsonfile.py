"""JSON from files that nobody vouches for."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from warp_embed.errors import FormatError


def read_json(path: Path, max_bytes: int) -> Any:
    """The value in a JSON file, read strictly.

    Parameters
    ----------
    path : Path
        File to read.
    max_bytes : int
        Larger files are refused before they are read.

    Raises
    ------
    FormatError     too large, not UTF-8, not JSON, nested too deeply, a key twice in one object, NaN or Infinity.
    OSError         the file cannot be read.
    """
    def refuse(why: str) -> NoReturn:
        raise FormatError(f"{path}: {why}", file=str(path))

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            names = [name for name, _ in items]
            refuse(f"the key {next(n for n in names if names.count(n) > 1)!r} appears twice")
        return found

    def constant(name: str) -> NoReturn:
        refuse(f"{name} is not a JSON number")

    with open(path, "rb") as file:
        raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        refuse(f"larger than {max_bytes} bytes")
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except FormatError:
        raise
    except RecursionError:
        refuse("nested too deeply")
    except ValueError as error:             # JSONDecodeError, UnicodeDecodeError, integers of thousands of digits
        refuse(f"not JSON: {error}")
