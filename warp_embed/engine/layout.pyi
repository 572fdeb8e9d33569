# What C shares with Cython is in layout.pxd.

KV_KINDS: dict[str, int]
