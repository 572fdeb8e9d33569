# Nothing of it is visible from Python: see linear.pxd.
