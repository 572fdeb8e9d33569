# Nothing of it is visible from Python: see layout.pxd.
