"""Show what fits in memory, before anything is loaded."""
from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from warp_embed.cli.common import add_json, add_memory_options, add_model, memory_options, print_json
from warp_embed.units import format_bytes

if TYPE_CHECKING:
    from warp_embed.runtime.forecast import Rung


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_memory_options(parser)
    parser.add_argument("--disk", action="store_true",
                        help="measure the disk for two seconds, past the page cache, and predict tokens per second")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    import warp_embed

    plan = warp_embed.plan(args.model, disk=args.disk, **memory_options(args))
    if args.json:
        print_json(plan.to_dict())
        return 0
    print(plan)
    if plan.rungs:
        print("\nWhat a size of memory buys (an estimate "
              + ("from how this model was used before" if plan.learned else
                 "for experts that are used as unevenly as is usual") + "):\n")
        print_rungs(plan.rungs)
    if plan.disk_bytes_per_s is not None:
        print(f"\nRandom reads of whole experts: {format_bytes(int(plan.disk_bytes_per_s))}/s"
              + ("" if plan.disk_direct else ". The page cache could not be bypassed on this file system: this is not "
                                             "the speed of the disk, and the predictions are too high"))
        print(f"Decoding: about {plan.tokens_per_s:.3g} tokens/s")
    return 0


def print_rungs(rungs: tuple[Rung, ...]) -> None:
    timed = rungs[0].tokens_per_s is not None
    print(f"{'memory':>8}  {'experts kept':>14}  {'found there':>11}  {'read per token':>14}" + "  tokens/s" * timed)
    for rung in rungs:
        speed = f"  {rung.tokens_per_s:8.3g}" if rung.tokens_per_s is not None else ""
        kept = f"{rung.cache_slots} ({rung.resident_share:.0%})"
        print(f"{format_bytes(rung.budget_bytes):>8}  {kept:>14}  {rung.hit_rate:>11.0%}  "
              f"{format_bytes(rung.read_bytes_per_token):>14}{speed}")
