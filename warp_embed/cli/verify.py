"""Check a container's checksums, and its error against its source.

Exit code 1 if something is damaged.
"""
from __future__ import annotations

import argparse
import dataclasses

from warp_embed.cli.common import add_json, add_model, print_json, progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--against", metavar="SRC", help="the checkpoint or container that it was made from")
    parser.add_argument("--threads", type=int, metavar="N", help="default: the cores this process may use")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from warp_embed.convert import verify
    from warp_embed.runtime.paths import find_model
    with progress("checking") as on_progress:
        report = verify(find_model(args.model), args.against, threads=args.threads, on_progress=on_progress)
    if args.json:
        print_json({**dataclasses.asdict(report), "ok": report.ok})
        return 0 if report.ok else 1
    width = max((len(kind.kind) for kind in report.kinds), default=0)
    for kind in report.kinds:
        error = "" if kind.relative_rms is None else (
            f"  error {100 * kind.relative_rms:.4f} %, at most {kind.max_error:.3g}")
        print(f"{kind.kind:<{width}} {kind.encoding:<5} {kind.count:>7}{error}")
    for problem in report.problems:
        print(f"damaged: {problem}")
    if report.n_problems > len(report.problems):
        print(f"... and {report.n_problems - len(report.problems)} more")
    verdict = "sound" if report.ok else f"{report.n_problems} problem{'' if report.n_problems == 1 else 's'}"
    print(f"{report.path}: {verdict}; {report.n_tensors} tensors and {report.n_records} records "
          f"in {report.seconds:.1f} s")
    return 0 if report.ok else 1
