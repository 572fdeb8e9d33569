"""Show the tokens of a text."""
from __future__ import annotations

import argparse
import sys

from warp_embed.cli.common import add_json, add_model, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("text", metavar="TEXT", help="- reads it from stdin")
    parser.add_argument("--markup", action="store_true", help="resolve special tokens such as <|im_end|>")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from warp_embed.runtime.manifest import Manifest
    from warp_embed.runtime.paths import find_model
    from warp_embed.runtime.tokenizer import Tokenizer
    folder = find_model(args.model)
    tokenizer = Tokenizer(folder, Manifest.read(folder, weights=False).config.vocab)
    text = sys.stdin.read() if args.text == "-" else args.text
    ids = tokenizer.encode_markup(text) if args.markup else tokenizer.encode(text)
    pieces = [tokenizer.token_bytes(token) for token in ids]
    if args.json:
        print_json({"tokens": ids, "pieces": [piece.decode("utf-8", "backslashreplace") for piece in pieces]})
        return 0
    special = set(tokenizer.special.values())
    for token, piece in zip(ids, pieces, strict=True):
        print(f"{token:>7}  {piece.decode('utf-8', 'backslashreplace')!r}{'  special' if token in special else ''}")
    print(f"{len(ids)} tokens")
    return 0
