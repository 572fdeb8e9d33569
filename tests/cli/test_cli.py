import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import platformdirs
import pytest

import warp_embed
from warp_embed.cli import common

PYTHON = [sys.executable, "-m", "warp_embed"]
SHORT = ["--max-tokens", "8", "--context", "256", "--threads", "1"]


# ---- describing ----

def test_plan(cli, container):
    code, out, err = cli("plan", container, "--memory", "6MB", "--context", "100", "--threads", "1")
    assert code == 0 and not err and "6.00 MB allowed" in out and "1 thread" in out
    code, out, _ = cli("plan", container, "--memory", "6MB", "--context", "100", "--threads", "1", "--json")
    assert json.loads(out) == warp_embed.plan(container, memory="6MB", context=100, threads=1).to_dict()
    code, out, _ = cli("plan", container, "--memory", "6MB", "--context", "100", "--disk")
    assert code == 0 and "found there" in out and "tokens/s" in out and "Random reads of whole experts" in out
    assert json.loads(cli("plan", container, "--memory", "8000000", "--json")[1])["limit_bytes"] == 8_000_000


def test_info(cli, container):
    code, out, _ = cli("info", container)
    assert code == 0 and "4 KDA, 1 MLA" in out and "8 in each of 4 layers" in out and "tokenizer, chat format" in out
    facts = json.loads(cli("info", container, "--json")[1])
    assert facts["vocab"] == 320 and facts["expert_encoding"] == "Q8G" and facts["text"] is True
    stored = os.path.getsize(container / "trunk.bin")
    assert 0.9 * stored <= sum(part["bytes"] for part in facts["trunk"].values()) <= stored


def test_list(cli, container, monkeypatch, tmp_path):
    monkeypatch.setattr(platformdirs, "user_data_dir", lambda *a, **k: str(tmp_path))
    assert cli("list")[1] == f"no models in {tmp_path / 'models'}\n" and json.loads(cli("list", "--json")[1]) == []
    (tmp_path / "models").symlink_to(container.parent)
    assert "gibberish" in cli("list")[1]
    (model,) = json.loads(cli("list", "--json")[1])
    assert model["name"] == "gibberish" and model["bytes"] > 1_000_000
    assert cli("plan", "gibberish")[0] == 0             # the name is enough


def test_tokenize(cli, container, monkeypatch):
    code, out, _ = cli("tokenize", container, "the é<|im_end|>")
    assert code == 0 and "257  'the'" in out and "special" not in out
    code, out, _ = cli("tokenize", container, "the é<|im_end|>", "--markup")
    assert code == 0 and "302  '<|im_end|>'  special" in out and out.endswith("4 tokens\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("中x"))
    assert json.loads(cli("tokenize", container, "-", "--json")[1])["pieces"] == ["中", "x"]


# ---- converting ----

def test_convert_and_verify(cli, checkpoint, tmp_path):
    path = tmp_path / "m.waste"
    code, out, _ = cli("convert", checkpoint, path, "--experts", "bf16", "--trunk", "f32")
    assert code == 0 and "32 records" in out
    code, out, _ = cli("verify", path, "--against", checkpoint)
    assert code == 0 and "sound" in out and "error 0.0000 %" in out
    assert json.loads(cli("verify", path, "--json")[1])["ok"] is True
    report = json.loads(cli("convert", path, tmp_path / "n.waste", "--trunk", "f32", "--json")[1])
    assert report["n_records"] == 32 and report["total_bytes"] > 0


def test_verify_of_a_damaged_container_is_exit_code_1(cli, checkpoint, tmp_path):
    path = tmp_path / "m.waste"
    cli("convert", checkpoint, path)
    bank = path / "experts-L1.bin"
    blob = bytearray(bank.read_bytes())
    blob[5000] ^= 1
    bank.write_bytes(blob)
    code, out, _ = cli("verify", path)
    assert code == 1 and "damaged: " in out and "1 problem;" in out
    assert cli("verify", path, "--json")[0] == 1


def test_an_existing_target_is_not_touched(cli, checkpoint, container):
    code, _, err = cli("convert", checkpoint, container)
    assert code == 2 and err.count("\n") == 1


# ---- running ----

def test_run_says_the_same_as_the_api(cli, container):
    with warp_embed.Model.open(container, context=256) as model, model.session() as session:
        expected = "".join(t.text for t in session.generate("Hello the", max_tokens=8))
    code, out, err = cli("run", container, "Hello the", *SHORT)
    assert (code, out, err) == (0, expected + "\n", "")
    result = json.loads(cli("run", container, "Hello the", *SHORT, "--json")[1])
    assert result["text"] == expected and len(result["tokens"]) == 8 and result["finish_reason"] == "length"
    assert result["prompt_tokens"] == 2 and result["hits"] + result["misses"] == 8 * 4 * 2


def test_run_verbose_says_how_fast_on_stderr(cli, container):
    code, out, err = cli("run", container, "Hello", *SHORT, "-v")
    assert code == 0 and "tokens/s" in err and "found in the cache" in err and "length" in err and "tokens/s" not in out


def test_run_samples_with_a_seed(cli, container):
    options = [*SHORT, "--temperature", "1.5", "--top-p", "0.9", "--top-k", "50", "--min-p", "0.01",
               "--repetition-penalty", "1.1"]
    texts = [cli("run", container, "Hello", *options, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_run_stops_before_a_stop_string(cli, container):
    text = cli("run", container, "Hello", *SHORT)[1].rstrip("\n")
    stop = text[len(text) // 2:][:2]
    assert cli("run", container, "Hello", *SHORT, "--stop", stop)[1] == text[:text.index(stop)] + "\n"


def feed(monkeypatch, *lines):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))


def test_chat_reads_questions_from_stdin(cli, container, monkeypatch, tmp_path):
    feed(monkeypatch, "Hello", "", "  the  ")
    code, straight, err = cli("chat", container, *SHORT, "--system", "the")
    assert code == 0 and err == ""
    feed(monkeypatch, "Hello", f"/save {tmp_path / 'a b.state'}", "/quit", "never")
    code, first, _ = cli("chat", container, *SHORT, "--system", "the")
    assert code == 0 and "saved" in first
    feed(monkeypatch, f"/restore {tmp_path / 'a b.state'}", "the")
    code, second, err = cli("chat", container, *SHORT, "-v")
    assert code == 0 and "restored" in second and "length" in err
    reply = first[:first.index("saved")]
    assert straight == reply + second.split("\n", 1)[1]      # saved and restored, it says what it would have said


def test_chat_takes_a_question_back(cli, container, monkeypatch, tmp_path):
    feed(monkeypatch, "Hello", "the")
    _, straight, _ = cli("chat", container, *SHORT)
    feed(monkeypatch, "Hello", "other", "/edit 2 the")
    code, edited, err = cli("chat", container, *SHORT)
    assert code == 0 and err == "" and edited.splitlines()[::2] == straight.splitlines()
    feed(monkeypatch, "Hello", f"/save {tmp_path / 'a'}", f"/restore {tmp_path / 'a'}", "/retry", "/edit 1 Hello")
    code, out, err = cli("chat", container, *SHORT)
    assert code == 0 and err == ""
    first, _, _, again, edited = out.splitlines()
    assert first == again == edited                     # greedy: the same answer
    feed(monkeypatch, "/retry", "/edit", "/edit 1 x", "Hello", "/edit 2 x", "/edit 0 x", "/edit 1", "/edit x y")
    code, out, err = cli("chat", container, *SHORT)
    assert code == 0 and err.count("error: ") == 7 and out.count("\n") == 1


def test_chat_restores_a_bare_session(cli, container, monkeypatch, tmp_path):
    with warp_embed.Model.open(container, context=64) as model, model.session() as session:
        session.prefill(model.tokenizer.encode("Hello"))
        session.save(tmp_path / "a")
    feed(monkeypatch, f"/restore {tmp_path / 'a'}", "the", "/retry")
    code, out, err = cli("chat", container, *SHORT)
    assert code == 0 and err == "" and out.count("\n") == 3


def test_ctrl_c_on_a_terminal_ends_the_reply_only(cli, container, monkeypatch):
    def interrupted(self, text, **options):
        yield warp_embed.Content("so far")
        raise KeyboardInterrupt

    class Keyboard(io.StringIO):
        def isatty(self):
            return True
    lines = iter(["Hello", "the", "/quit"])
    monkeypatch.setattr(sys, "stdin", Keyboard())
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(warp_embed.Chat, "events", interrupted)
    assert cli("chat", container, *SHORT) == (0, "so far\nso far\n", "")
    feed(monkeypatch, "Hello", "the")                   # from a pipe it ends the program
    assert cli("chat", container, *SHORT)[0] == 130


def test_chat_goes_on_after_a_mistake(cli, container, monkeypatch, tmp_path):
    feed(monkeypatch, "/save", "/restore", f"/restore {tmp_path / 'absent'}", "/what", "x" * 400, "Hello")
    code, out, err = cli("chat", container, *SHORT)
    assert code == 0 and err.count("error: ") == 5 and out.strip()


# ---- what goes wrong ----

@pytest.mark.parametrize("arguments", [
    ["plan", "no-such-model"], ["info", "no-such-model"], ["run", "no-such-model", "x"],
    ["plan", "MODEL", "--memory", "1KB"], ["plan", "MODEL", "--memory", "lots"], ["plan", "MODEL", "--context", "0"],
    ["plan", "MODEL", "--kv", "f64"], ["plan", "MODEL", "--threads", "0"], ["plan", "MODEL", "--threads", "x"],
    ["run", "MODEL", ""], ["run", "MODEL", "x", "--top-p", "2"], ["run", "MODEL", "x", "--max-tokens", "0"],
    ["run", "MODEL", "x", "--stop", ""], ["run", "MODEL", "x", "--seed", "-1"], ["run", "MODEL"],
    ["run", "MODEL", "x" * 300, "--context", "256"], ["convert", "MODEL"], ["convert", "/nowhere", "/nowhere2"],
    ["verify", "MODEL", "--against", "/nowhere"], ["unknown"], ["plan", "MODEL", "--unknown"],
])
def test_a_user_s_error_is_one_line_and_exit_code_2(cli, container, arguments):
    code, out, err = cli(*[container if a == "MODEL" else a for a in arguments])
    assert code == 2 and out == "" and err.startswith("warp-embed: error: ") and err.count("\n") == 1


def test_without_a_command_there_is_help(cli):
    code, out, _ = cli()
    assert code == 2 and all(name in out for name in ("demo", "list", "plan", "info", "run", "chat", "convert",
                                                      "verify", "tokenize"))
    assert cli("--version") == (0, f"warp-embed {warp_embed.__version__}\n", "")
    for name in ("demo", "run", "chat", "convert"):
        code, out, _ = cli(name, "--help")
        assert code == 0 and "--help" in out


def test_a_model_without_a_tokenizer_says_so(cli, tmp_path):
    from gibberish import KL_TINY
    path = tmp_path / "ids.waste"
    code, _, err = cli("convert", KL_TINY, path)
    assert code == 0 and "\nwarning: " in err
    code, _, err = cli("run", path, "Hello")
    assert code == 2 and "tokenizer.model" in err


@pytest.fixture
def endless(container, tmp_path):
    """The same model without an end of sequence."""
    path = shutil.copytree(container, tmp_path / "endless.waste")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["config"]["eos_token_id"] = None
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and pipes")
def test_a_reader_that_leaves_ends_it_quietly(endless):
    work = subprocess.Popen([*PYTHON, "run", endless, "Hello", "--max-tokens", "8000"], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)
    work.stdout.read(1)
    work.stdout.close()
    assert (work.stderr.read(), work.wait(60)) == (b"", 141)
    work.stderr.close()


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and pipes")
def test_ctrl_c_is_exit_code_130(endless):
    work = subprocess.Popen([*PYTHON, "run", endless, "Hello", "--max-tokens", "8000"], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, pipesize=4096)      # too small for all: it cannot end before
    work.stdout.read(1)
    time.sleep(0.1)
    work.send_signal(signal.SIGINT)
    work.stdout.read()
    err = work.stderr.read()
    assert work.wait(60) == 130 and b"Traceback" not in err
    work.stdout.close()
    work.stderr.close()


def test_a_terminal_of_another_encoding_gets_question_marks(container):
    done = subprocess.run([*PYTHON, "tokenize", container, "é"], capture_output=True, timeout=60,
                          env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and b"?" in done.stdout


# ---- progress ----

class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_bars_are_drawn_on_a_terminal_only_and_after_a_second(monkeypatch):
    pytest.importorskip("tqdm")
    with common.progress("x") as on_progress:
        assert on_progress is None
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with common.progress("reading") as on_progress:
        on_progress("phase", 5, 10)
        assert terminal.getvalue() == ""                # quick work shows nothing
        time.sleep(1.05)
        on_progress(9, 10)
    assert "phase" in terminal.getvalue() and "90%" in terminal.getvalue()


def test_without_tqdm_there_is_no_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with common.progress("x") as on_progress:
        assert on_progress is None


def test_what_a_model_thinks_is_dim_on_a_terminal_and_nowhere_else(cli, container, monkeypatch, capsys):
    def thinks(self, text, *, effort, **options):
        yield from (warp_embed.Reasoning(f"so {effort} \x1b[31m"), warp_embed.Content("yes"), warp_embed.Content("!"))

    monkeypatch.setattr(warp_embed.Chat, "events", thinks)
    feed(monkeypatch, "Hello")
    assert cli("chat", container, *SHORT, "--effort", "low") == (0, "yes!\n", "")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    feed(monkeypatch, "Hello")
    shown = cli("chat", container, *SHORT, "--effort", "low")[1]
    assert shown == "\x1b[2mso low \ufffd[31m\x1b[0m\n\nyes!\n"


def test_effort_is_refused_by_a_model_that_does_not_think(cli, container, monkeypatch):
    feed(monkeypatch, "Hello")
    code, out, err = cli("chat", container, *SHORT, "--effort", "low")
    assert out == "" and "no effort" in err
