"""The demonstration: on gibberish for its shape, on the shipped model for its answers."""
import re
import time
from pathlib import Path

import pytest

import warp_embed


def test_the_demo_shows_its_parts(cli, container):
    code, out, err = cli("demo", container)
    assert (code, err) == (0, "")
    assert "trunk" in out and out.count("> What") == 4 and "tokens/s" in out and "found in the cache" in out
    assert "restored" in out and "> What is my name?" in out and "\x1b[" not in out


@pytest.mark.skipif(not Path(warp_embed.demo_path()).is_dir(), reason="the demo model is not there yet")
def test_the_demo_gives_real_answers_in_a_few_seconds(cli):
    started = time.monotonic()
    code, out, err = cli("demo")
    assert (code, err) == (0, "") and time.monotonic() - started < 20
    before, after = out.split("Saved, closed")
    assert "Paris" in before and "cold" in before and "12" in before and "Clara" in before and "Clara" in after
    assert re.search(r"[0-9]+ tokens/s", before)


def test_what_a_model_says_cannot_command_a_terminal(monkeypatch):
    import io
    import sys

    from warp_embed.cli.common import show
    for terminal, expected in ((True, "a\ufffd[2Jb\n\t\ufffd"), (False, "a\x1b[2Jb\n\t\x9b")):
        stream = io.StringIO()
        stream.isatty = lambda terminal=terminal: terminal
        monkeypatch.setattr(sys, "stdout", stream)
        show("a\x1b[2Jb\n\t\x9b")
        assert stream.getvalue() == expected
