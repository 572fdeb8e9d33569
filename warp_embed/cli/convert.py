"""Make a container from a Hugging Face checkpoint, or from another container."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from warp_embed.cli.common import add_json, print_json, progress

if TYPE_CHECKING:
    from warp_embed.convert import Estimate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="folder with config.json and safetensors, or a container")
    parser.add_argument("dst", metavar="DST", help="the container to write; a run that was interrupted is continued")
    parser.add_argument("--trunk", choices=("auto", "f32", "q8", "q4"), default="auto",
                        help="encoding of the weights that stay in memory")
    parser.add_argument("--experts", choices=("auto", "f32", "bf16", "q8", "q4", "mxfp4", "vq3", "vq2", "vq4p"),
                        default="auto", help="encoding of the experts; mxfp4 keeps a release's own, unchanged")
    parser.add_argument("--threads", type=int, metavar="N", help="default: the cores this process may use")
    parser.add_argument("--reclaim", action="store_true",
                        help="delete each shard of SRC as soon as all of it is safe in the container: for small disks")
    parser.add_argument("--plan-only", action="store_true",
                        help="write DST with a manifest and no weights, for `warp-embed plan`, and say what converting "
                             "would take; of SRC config.json is enough")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from warp_embed.convert import convert
    from warp_embed.units import format_bytes
    options = {"trunk": args.trunk, "experts": args.experts, "threads": args.threads}
    if args.plan_only:
        return plan_only(args, options)

    said: list[str] = []

    def on_start(found: Estimate) -> None:
        print(describe(found, args.reclaim), file=sys.stderr)
        if args.reclaim:                # now, not when the source is gone
            warn(found.warnings)
            said.extend(found.warnings)

    with progress("converting") as on_progress:
        report = convert(args.src, args.dst, reclaim=args.reclaim, on_start=on_start, on_progress=on_progress,
                         **options)
    warn([warning for warning in report.warnings if warning not in said])
    if args.json:
        print_json(vars(report))
        return 0
    print(f"{report.path}: {format_bytes(report.total_bytes)} in {report.seconds:.1f} s")
    print(f"trunk    {report.trunk:<5} {format_bytes(report.trunk_bytes):>8}  {report.n_tensors} tensors; "
          f"{report.trunk_reason}")
    if report.n_records:
        print(f"experts  {report.experts:<5} {format_bytes(report.expert_bytes):>8}  {report.n_records} records; "
              f"{report.experts_reason}")
    if report.reclaimed_bytes:
        print(f"deleted  {format_bytes(report.reclaimed_bytes)} of {args.src}; {report.path}/reclaim.json says what")
    return 0


def warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def plan_only(args: argparse.Namespace, options: dict[str, Any]) -> int:
    from warp_embed.convert import outline
    plan, found = outline(args.src, args.dst, **options)
    if args.json:
        print_json({"path": args.dst, "trunk": plan.trunk_option, "experts": plan.experts_option,
                    "trunk_reason": plan.trunk_reason, "experts_reason": plan.experts_reason, **vars(found)})
        return 0
    print(f"trunk    {plan.trunk_option:<5} {plan.trunk_reason}")
    print(f"experts  {plan.experts_option:<5} {plan.experts_reason}")
    print(describe(found, None))
    print(f"{args.dst} has a manifest and no weights: warp-embed plan {args.dst}")
    return 0


def describe(found: Estimate, reclaim: bool | None) -> str:
    """The lines before the start. reclaim: asked for or not; None where nothing will be written."""
    from warp_embed.units import format_bytes as b
    needed = found.reclaim_needed_bytes if reclaim else found.needed_bytes
    free = "" if reclaim is None else f"; {b(needed)} of the {b(found.free_bytes)} that are free"
    kept = f", {b(found.kept_bytes)} of it from an earlier run" if found.kept_bytes else ""
    less = ("" if found.reclaim_peak_bytes == found.peak_bytes
            else f", {b(found.reclaim_peak_bytes)} with --reclaim")
    lines = [f"sizes    source {b(found.source_bytes)}; container {b(found.container_bytes)} (trunk "
             f"{b(found.trunk_bytes)}, experts {b(found.expert_bytes)}){kept}",
             f"disk     both together {b(found.peak_bytes)} at most{less}{free}"]
    if found.seconds is not None:
        lines.append(f"time     about {duration(found.seconds)} on {found.threads} threads, measured on a few pieces")
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """"45 s", "12 min", "38 h"."""
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
