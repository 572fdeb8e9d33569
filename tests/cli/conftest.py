import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from gibberish import write_checkpoint  # noqa: E402


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def container(checkpoint, tmp_path_factory):
    from warp_embed.convert import convert
    path = tmp_path_factory.mktemp("models") / "gibberish.waste"
    convert(checkpoint, path)
    return path


@pytest.fixture
def cli(capsys):
    """Run a command in this process: (exit code, stdout, stderr)."""
    from warp_embed.cli.__main__ import main

    def run(*arguments):
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:                      # argparse
            code = stop.code
        return (code, *capsys.readouterr())
    return run
