# Nothing of it is visible from Python: see attention.pxd.
