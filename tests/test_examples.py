"""Every program in examples/ runs as a user would run it."""
import os
import re
import subprocess
import sys
from pathlib import Path

import warp_embed

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(*command, cwd):
    where = {"PYTHONPATH": str(Path(warp_embed.__file__).parents[1])}         # also a package that was built in place
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, encoding="utf-8",
                          timeout=120, env={**os.environ, **where})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_has_a_test():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"embed.py"}


def test_embed_answers(tmp_path):
    assert "Paris" in run(EXAMPLES / "embed.py", cwd=tmp_path)
    assert "Rome" in run(EXAMPLES / "embed.py", "What is the capital of Italy?", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_program_in_the_readme_runs(tmp_path):
    code = re.search(r"```python\n(.*?)```", (EXAMPLES.parent / "README.md").read_text(encoding="utf-8"), re.S)[1]
    assert "Paris" in run("-c", code, cwd=tmp_path)
    assert (tmp_path / "chat.state").is_file()
