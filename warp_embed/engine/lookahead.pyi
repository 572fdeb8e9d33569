# Nothing of it is visible from Python: see lookahead.pxd.
