"""python -m benchmarks kernels|model|stream|host|k3."""
import argparse
import sys

from benchmarks import host, k3, kernels, model, stream


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure warp_embed on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    for module in (kernels, model, stream, host, k3):
        module.add_parser(commands)
    arguments = parser.parse_args(argv)
    arguments.argv = sys.argv[1:] if argv is None else argv         # stream starts itself again
    try:
        return arguments.run(arguments)
    except (ValueError, OSError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
