"""Show what fits in memory, before anything is loaded."""
from __future__ import annotations

import argparse

from warp_embed.cli.common import add_json, add_memory_options, add_model, memory_options, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_memory_options(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    import warp_embed
    plan = warp_embed.plan(args.model, **memory_options(args))
    if args.json:
        print_json(plan.to_dict())
    else:
        print(plan)
    return 0
