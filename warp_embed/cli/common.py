"""What several commands share: options, progress, how numbers are shown."""
from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warp_embed import Model, Sampling, Token


def add_model(parser: argparse.ArgumentParser, **kwargs: Any) -> None:
    parser.add_argument("model", metavar="MODEL", help="a container: its path, or its name in the models folder",
                        **kwargs)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def add_memory_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory")
    group.add_argument("--memory", type=_memory, default="auto", metavar="SIZE",
                       help='ceiling for the engine: "24GB", "24GiB", bytes, or "auto": what is free now (default)')
    group.add_argument("--context", type=int, default=8192, metavar="N", help="most tokens of a session (default 8192)")
    group.add_argument("--kv", choices=("f32", "f16", "q8"), default="f16",
                       help="how attention latents are stored (default f16)")
    group.add_argument("--threads", type=int, metavar="N", help="default: the physical cores this process may use")
    group.add_argument("--experts-per-token", type=int, metavar="N",
                       help="fewer than the model was trained with: faster, and worse")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("choosing tokens")
    group.add_argument("--max-tokens", type=int, default=512, metavar="N", help="most tokens of a reply (default 512)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T",
                       help="0 always takes the most probable token (default)")
    group.add_argument("--top-k", type=int, default=0, metavar="N", help="only the N most probable; 0 is off")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P",
                       help="only the most probable that together reach P; 1 is off")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P",
                       help="only those at least P times as probable as the first; 0 is off")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="1 is off")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be repeated")
    parser.add_argument("-v", "--verbose", action="store_true", help="say on stderr how fast it was")


def _memory(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def memory_options(args: argparse.Namespace) -> dict[str, Any]:
    return {"memory": args.memory, "context": args.context, "kv": args.kv, "threads": args.threads,
            "experts_per_token": args.experts_per_token}


def sampling(args: argparse.Namespace) -> Sampling:
    from warp_embed import Sampling
    return Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p,
                    repetition_penalty=args.repetition_penalty, seed=args.seed)


@contextlib.contextmanager
def open_model(args: argparse.Namespace) -> Iterator[Model]:
    from warp_embed import Model
    with progress("loading") as on_progress:
        model = Model.open(args.model, on_progress=on_progress, **memory_options(args))
    with model:
        yield model


@contextlib.contextmanager
def progress(what: str, unit: str = "B") -> Iterator[Callable[..., None] | None]:
    """A callback ``([phase,] done, total)`` that draws a bar: on a terminal, after a second, if tqdm is installed."""
    bar = None
    if sys.stderr is not None and sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from tqdm import tqdm
            bar = tqdm(desc=what, unit=unit, unit_scale=True, delay=1, leave=False, file=sys.stderr)
    if bar is None:
        yield None
        return

    def advance(*state: Any) -> None:
        *phase, done, total = state
        if phase:
            bar.set_description(str(phase[0]), refresh=False)
        bar.total = total
        bar.update(done - bar.n)

    with bar:
        yield advance


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


# What a model says may hold escape sequences, and a terminal would obey them.
_CONTROLS = {i: "\ufffd" for i in (*range(9), *range(11, 32), *range(127, 160))}


def show(text: str, code: str = "") -> None:
    """A piece of a model's text, which is still going on; code: as for styled."""
    text = text.translate(_CONTROLS) if sys.stdout.isatty() else text
    sys.stdout.write(styled(text, code) if code else text)
    sys.stdout.flush()


def speed(n: int, seconds: float) -> str:
    """``"12 tokens in 0.10 s (120 tokens/s)"``"""
    rate = f" ({n / seconds:.{1 if n < 10 * seconds else 0}f} tokens/s)" if seconds > 0 else ""
    return f"{n} token{'' if n == 1 else 's'} in {seconds:.2f} s{rate}"


def spent(tokens: Iterable[Token]) -> str:
    """What decoding some tokens took: time, cache, disk."""
    stats = [token.stats for token in tokens]
    text = speed(len(stats), sum(s.total_ms for s in stats) / 1000)
    used = cache_use(sum(s.hits for s in stats), sum(s.misses for s in stats), sum(s.bytes_read for s in stats))
    return f"{text}; {used}" if used else text


def cache_use(hits: int, misses: int, bytes_read: int) -> str:
    """``"experts: 90 % of 200 found in the cache, 1.20 MB read from disk"``; nothing if none were used."""
    from warp_embed.units import format_bytes
    if not hits + misses:
        return ""
    return (f"experts: {100 * hits / (hits + misses):.0f} % of {hits + misses} found in the cache, "
            f"{format_bytes(bytes_read)} read from disk")


def styled(text: str, code: str) -> str:
    """Text with a terminal style (1 bold, 2 dim), if stdout is a terminal."""
    return f"\x1b[{code}m{text}\x1b[0m" if sys.stdout.isatty() else text
