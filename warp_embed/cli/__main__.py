"""``warp-embed COMMAND ...``: reads the arguments, runs a command, turns what went wrong into one line.

Exit codes: 0 done, 1 a check found something wrong, 2 the user can mend it, 130 Ctrl-C, 141 nobody reads the output.
"""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

PROGRAM = "warp-embed"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{PROGRAM}: error: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    from warp_embed.cli import chat, convert, demo, info, plan, run, tokenize, verify
    from warp_embed.cli import list as list_

    top = Parser(prog=PROGRAM, description="Run a mixture-of-experts language model within the memory you allow.")
    top.add_argument("--version", action="store_true", help="show the version and stop")
    commands = top.add_subparsers(metavar="COMMAND", parser_class=Parser)
    for module in (demo, list_, plan, info, run, chat, convert, verify, tokenize):
        name = module.__name__.rpartition(".")[2]
        assert module.__doc__ is not None
        summary = module.__doc__.partition("\n")[0].rstrip(".")
        command = commands.add_parser(name, help=summary, description=module.__doc__,
                                      formatter_class=argparse.RawDescriptionHelpFormatter)
        module.add_arguments(command)
        command.set_defaults(call=module.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):             # a terminal that lacks a character shows "?"
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    top = parser()
    args = top.parse_args(argv)
    if args.version:
        from warp_embed import __version__
        print(f"{PROGRAM} {__version__}")
        return 0
    if not hasattr(args, "call"):
        top.print_help()
        return 2
    from warp_embed.errors import WarpError
    try:
        code: int = args.call(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:                             # as in `warp-embed run ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except (WarpError, OSError, ValueError, ImportError, MemoryError) as error:
        sys.stdout.flush()
        print(f"{PROGRAM}: error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
