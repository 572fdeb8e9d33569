"""Make a container from a Hugging Face checkpoint, or from another container."""
from __future__ import annotations

import argparse
import sys

from warp_embed.cli.common import add_json, print_json, progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="folder with config.json and safetensors, or a container")
    parser.add_argument("dst", metavar="DST", help="the container to write; a run that was interrupted is continued")
    parser.add_argument("--trunk", choices=("auto", "f32", "q8", "q4"), default="auto",
                        help="encoding of the weights that stay in memory")
    parser.add_argument("--experts", choices=("auto", "f32", "bf16", "q8", "q4", "mxfp4", "vq3", "vq2", "vq4p"),
                        default="auto", help="encoding of the experts; mxfp4 keeps a release's own, unchanged")
    parser.add_argument("--threads", type=int, metavar="N", help="default: the cores this process may use")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from warp_embed.convert import convert
    from warp_embed.units import format_bytes
    with progress("converting") as on_progress:
        report = convert(args.src, args.dst, trunk=args.trunk, experts=args.experts, threads=args.threads,
                         on_progress=on_progress)
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if args.json:
        print_json(vars(report))
        return 0
    print(f"{report.path}: {format_bytes(report.total_bytes)} in {report.seconds:.1f} s")
    print(f"trunk    {report.trunk:<5} {format_bytes(report.trunk_bytes):>8}  {report.n_tensors} tensors; "
          f"{report.trunk_reason}")
    if report.n_records:
        print(f"experts  {report.experts:<5} {format_bytes(report.expert_bytes):>8}  {report.n_records} records; "
              f"{report.experts_reason}")
    return 0
