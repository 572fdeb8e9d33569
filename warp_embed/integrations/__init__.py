"""Event loops that a model can live beside: one module per host, each a thin layer over the public API."""
