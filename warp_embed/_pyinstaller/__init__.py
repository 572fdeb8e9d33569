"""What PyInstaller needs to know to put warp_embed into an application; it finds this by an entry point."""
from __future__ import annotations

import os


def get_hook_dirs() -> list[str]:
    """Folders with hook-*.py files."""
    return [os.path.dirname(__file__)]
