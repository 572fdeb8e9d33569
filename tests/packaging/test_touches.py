"""A program with a model inside: no network, no process, no file but those it asked for, nothing printed."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import warp_embed

PROGRAM = """
import json, os, sys
seen = []
def watch(event, args):
    if event == "open" and isinstance(args[0], int):
        pass                                            # a descriptor: its file was seen when it was opened
    elif event == "open" and (set(str(args[1] or "")) & set("wax+") or (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)):
        seen.append("writes " + os.fsdecode(args[0]))
    elif event.startswith(("socket.", "subprocess.", "os.exec", "os.posix_spawn", "os.fork", "os.system", "os.putenv",
                           "ctypes.dlopen", "urllib.", "http.", "signal.")):
        seen.append(event)
import warp_embed
sys.addaudithook(watch)
with warp_embed.Model.open(warp_embed.demo_path(), context=256, **json.loads(sys.argv[3])) as model:
    chat = model.chat()
    answer = "".join(chat.ask("What is the capital of France?"))
    chat.session.save(sys.argv[1])
    model.restore(sys.argv[1]).close()
with open(sys.argv[2], "w") as file:
    json.dump([answer, seen], file)
"""


PLAN = warp_embed.plan(warp_embed.demo_path(), context=256)
LITTLE = {"memory": PLAN.floor_bytes + 5 * PLAN.record_bytes}           # two sessions, and experts from disk


@pytest.mark.parametrize("options, remembered", [({}, 0), (LITTLE, 1), ({**LITTLE, "hot_list": False}, 0)])
def test_a_conversation_touches_only_what_it_was_given(tmp_path, options, remembered):
    """And, when experts come from disk, one small file in the cache folder, unless told not to."""
    home, out, state = tmp_path / "home", tmp_path / "out.json", tmp_path / "saved" / "chat.state"
    run = tmp_path / "run"
    home.mkdir()
    run.mkdir(mode=0o700)
    state.parent.mkdir()
    names = ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "TMPDIR", "LOCALAPPDATA")
    env = {**os.environ, **dict.fromkeys(names, home), "XDG_RUNTIME_DIR": str(run),
           "PYTHONPATH": str(Path(warp_embed.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-B", "-c", PROGRAM, state, out, json.dumps(options)], cwd=home,
                          capture_output=True, timeout=120, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    answer, seen = json.loads(out.read_text())
    assert "Paris" in answer
    hot = home / "warp_embed" / "hot"                   # where platformdirs looks for XDG_CACHE_HOME
    given = tuple(f"writes {path}" for path in (state.parent, out, *[hot] * remembered))
    assert [event for event in seen if not event.startswith(given)
            and not re.fullmatch(r"writes .*warp_embed\S*claim(s\.lock|-\d+-\d+\.json)", event)] == []
    assert [path.name for path in state.parent.iterdir()] == ["chat.state"]
    left = [path for folder in (home, run) for path in folder.rglob("*") if path.is_file()]
    if options:
        assert len(left) == remembered and all(path.suffix == ".hot" and path.parent == hot for path in left)
    else:       # automatic opens take turns with it; the claim itself is gone
        assert [path.name for path in left] == ["claims.lock"]
    if os.name == "posix":
        assert state.stat().st_mode & 0o777 == 0o600
