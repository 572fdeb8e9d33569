"""``python -m warp_embed``: the command line."""
import sys

from warp_embed.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
