"""Tables for people, JSON for programs, plots."""
import json
from pathlib import Path


def add_arguments(parser):
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured")
    parser.add_argument("--plot", metavar="FILE", help="draw it (PNG, SVG or PDF; needs matplotlib)")


def print_rows(title, rows, columns):
    """A table with those of the columns that some row has."""
    used = [name for name in columns if any(row.get(name) is not None for row in rows)]
    cells = [used, *[[shown(name, row.get(name)) for name in used] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(used))]
    numeric = [any(isinstance(row.get(name), (int, float)) for row in rows) for name in used]
    print(f"\n{title}")
    for line in cells:
        print("  ".join(cell.rjust(width) if right else cell.ljust(width)
                        for cell, width, right in zip(line, widths, numeric, strict=True)).rstrip(), flush=True)


def shown(name, value):
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if name.startswith("of ") or name == "spread":
        return f"{100 * value:.0f} %"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def write(arguments, document, plot):
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        draw(arguments.plot, document, plot)


def draw(path, document, plot):
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(10, max(3, 0.2 * len(document["rows"]))))
    plot(document, axes)
    axes.set_title(document["processor"])
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
