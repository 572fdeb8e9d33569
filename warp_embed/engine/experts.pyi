# Nothing of it is visible from Python: see experts.pxd.
