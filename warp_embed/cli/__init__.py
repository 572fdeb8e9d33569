"""The command line: one file a command, each a client of the public API."""
