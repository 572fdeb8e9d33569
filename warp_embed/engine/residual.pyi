# Nothing of it is visible from Python: see residual.pxd.
