"""Every program in examples/ runs as a user would run it."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import warp_embed

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


# Windows and the game have tests of their own, which drive them.
DRIVEN = {"qt_chat.py", "tk_notes.py", "pygame_scene.py"}


def run(*command, cwd, typed=None):
    where = {"PYTHONPATH": str(Path(warp_embed.__file__).parents[1]),         # also a package that was built in place
             "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, encoding="utf-8",
                          input=typed, timeout=120, env={**os.environ, **where})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_has_a_test():
    tested = {path.name.replace("test_", "") for path in Path(__file__).parent.glob("integrations/test_*.py")}
    assert tested >= DRIVEN
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"embed.py", "assistant.py", "agent.py"} | DRIVEN


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_its_first_line_says_what_it_is(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 370 and lines[0].startswith('"""')
    assert any(f"python examples/{path.name}" in line for line in lines[:10])


def test_embed_answers(tmp_path):
    assert "Paris" in run(EXAMPLES / "embed.py", cwd=tmp_path)
    assert "Rome" in run(EXAMPLES / "embed.py", "What is the capital of Italy?", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_program_in_the_readme_runs(tmp_path):
    code = re.search(r"```python\n(.*?)```", (EXAMPLES.parent / "README.md").read_text(encoding="utf-8"), re.S)[1]
    assert "Paris" in run("-c", code, cwd=tmp_path)
    assert (tmp_path / "chat.state").is_file()


def test_the_assistant_goes_on_the_next_day(tmp_path):
    def day(*lines):
        return run(EXAMPLES / "assistant.py", "--state", tmp_path / "kept" / "it", cwd=tmp_path,
                   typed="".join(line + "\n" for line in lines))
    first = day("My name is Clara.", "What is the capital of France?", "/edit What is the capital of Italy?", "/retry")
    assert "Clara" in first and "is Paris." in first and first.count("The capital of Italy is Rome.") == 2
    assert "tokens/s" in first and "Kept for next time" in first
    second = day("/nonsense", "/edit", "What is my name?", "/quit", "not read any more")
    assert "Welcome back: 2 questions" in second and "Your name is Clara." in second and "no /nonsense" in second
    third = day("/help", "/retry", "/forget", "/retry", "/edit x")
    assert "/edit TEXT" in third and "Forgotten" in third and third.count("nothing was asked") == 2
    assert "Ask something." in day()
    day("Hello.")
    (tmp_path / "kept" / "it").write_bytes(b"no state")
    assert "cannot go on" in day("What is 7 plus 5?")
    assert "Welcome back: 1 question so far" in day()


def test_the_agent_takes_the_best_branch_and_asks_tools_when_unsure(tmp_path):
    said = run(EXAMPLES / "agent.py", cwd=tmp_path)
    assert re.search(r"The capital of Italy is Rome[.]  ✓", said) and "letters in Rome is 4" in said
    assert "calculator  1234 times 5678 is 7006652." in said and "calendar  Today is" in said
    assert re.search(r"Your name is Ada[.]  ✓", said)
    assert said.rstrip().splitlines()[-1].startswith("1 session is left")
    said = run(EXAMPLES / "agent.py", "--branches", "1", "What is 7 plus 5?", cwd=tmp_path)
    assert "└─ ●  " in said and "12." in said
