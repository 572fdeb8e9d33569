"""Every program in examples/ runs as a user would run it."""
import subprocess
import sys
from pathlib import Path

import pytest

import warp_embed

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

pytestmark = pytest.mark.skipif(not Path(warp_embed.demo_path()).is_dir(), reason="the demo model is not there yet")


def run(name, *arguments, cwd):
    done = subprocess.run([sys.executable, EXAMPLES / name, *arguments], cwd=cwd, capture_output=True, text=True,
                          encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_has_a_test():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"embed.py"}


def test_embed_answers(tmp_path):
    assert "Paris" in run("embed.py", cwd=tmp_path)
    assert "tokens" in run("embed.py", "What is the opposite of hot?", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
