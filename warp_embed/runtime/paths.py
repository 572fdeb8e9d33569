"""Where models are looked for, and where things are remembered."""
from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

AnyPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def models_dir() -> Path:
    """The folder in which models are found by name; it need not exist."""
    # Imported on use: importing warp_embed has to be quick.
    import platformdirs

    return Path(platformdirs.user_data_dir("warp_embed", appauthor=False)) / "models"


def runtime_dir() -> Path:
    """The folder for what running processes tell each other; it need not exist."""
    if os.name == "posix" and sys.platform != "darwin":
        base = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
        if not os.access(base, os.W_OK | os.X_OK):      # platformdirs would print a warning
            return Path(tempfile.gettempdir()) / f"warp_embed-{os.getuid()}"
    import platformdirs

    return Path(platformdirs.user_runtime_dir("warp_embed", appauthor=False))


def cache_dir() -> Path:
    """The folder for what can be lost at any time; it need not exist."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("warp_embed", appauthor=False))


def find_model(name: AnyPath) -> Path:
    """The container that a path or a name means.

    Parameters
    ----------
    name : str, bytes or os.PathLike
        A path to a container, or the NAME of ``NAME`` or ``NAME.waste`` in `models_dir`. A path that exists goes first.

    Raises
    ------
    FileNotFoundError       nothing there; the message names every folder that was searched.
    NotADirectoryError      a file; a container is a folder.
    """
    text = os.fsdecode(name)
    path = Path(text)
    if text and path.is_dir():
        return path
    if text and path.exists():
        raise NotADirectoryError(f"{text} is a file; a model is a folder with a manifest.json")
    searched = [str(path.parent.absolute())]
    if text and path.name == text:                  # one component: never leaves the models folder
        folder = models_dir()
        searched.append(str(folder))
        for candidate in (folder / text, folder / f"{text}.waste"):
            if candidate.is_dir():
                return candidate
    raise FileNotFoundError(f"no model {text!r} in {' or '.join(searched)}")


def list_models() -> list[Path]:
    """The containers in `models_dir`, sorted by name."""
    folder = models_dir()
    try:
        found = [entry for entry in folder.iterdir() if (entry / "manifest.json").is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found)
