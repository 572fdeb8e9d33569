"""Continue a text."""
from __future__ import annotations

import argparse
import sys
import time

from warp_embed.cli.common import (
    add_json,
    add_memory_options,
    add_model,
    add_sampling_options,
    open_model,
    print_json,
    progress,
    sampling,
    show,
    speed,
    spent,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from stdin")
    add_sampling_options(parser)
    add_memory_options(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    choice = sampling(args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    with open_model(args) as model, model.session() as session:
        ids = model.tokenizer.encode(prompt)
        started = time.perf_counter()
        with progress("prompt", unit=" tokens") as on_progress:
            session.prefill(ids, on_progress=on_progress)
        prompt_s = time.perf_counter() - started
        tokens = []
        for token in session.generate(None, max_tokens=args.max_tokens, sampling=choice, stop=args.stop):
            tokens.append(token)
            if not args.json:
                show(token.text)
    if args.json:
        print_json({"text": "".join(t.text for t in tokens), "tokens": [t.id for t in tokens],
                    "logprobs": [t.logprob for t in tokens], "finish_reason": tokens[-1].finish_reason,
                    "prompt_tokens": len(ids), "prompt_s": prompt_s,
                    "decode_s": sum(t.stats.total_ms for t in tokens) / 1000,
                    "hits": sum(t.stats.hits for t in tokens), "misses": sum(t.stats.misses for t in tokens),
                    "bytes_read": sum(t.stats.bytes_read for t in tokens)})
    else:
        print()
    if args.verbose:
        print(f"prompt: {speed(len(ids), prompt_s)}\nreply: {spent(tokens)}; ended by "
              f"{tokens[-1].finish_reason}", file=sys.stderr)
    return 0
