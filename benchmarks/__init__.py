"""Measurements of warp_embed, for its developers: run `python -m benchmarks` in a checkout. See docs/benchmarks.md."""
