"""List the models in the models folder."""
from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from warp_embed.cli.common import add_json, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from warp_embed.runtime.paths import list_models, models_dir
    from warp_embed.units import format_bytes
    models: list[dict[str, Any]] = [{"name": path.name.removesuffix(".waste"), "path": str(path), "bytes": _size(path)}
              for path in list_models()]
    if args.json:
        print_json(models)
    elif not models:
        print(f"no models in {models_dir()}")
    for model in () if args.json else models:
        print(f"{model['name']:<32} {format_bytes(model['bytes']):>8}  {model['path']}")
    return 0


def _size(folder: Path) -> int:
    return sum(entry.stat().st_size for entry in folder.iterdir() if entry.is_file())
