"""examples/tk_notes.py, driven as a person would: write, ask, stop, look elsewhere, quit and come back."""
import pytest
from conftest import until

import warp_embed

tkinter = pytest.importorskip("tkinter", reason="this Python has no tkinter; on Debian: apt install python3-tk")


@pytest.fixture(autouse=True)
def no_errors(monkeypatch):
    """An exception in a callback fails the test."""
    errors = []
    monkeypatch.setattr(tkinter.Tk, "report_callback_exception", lambda self, kind, error, trace: errors.append(error))
    yield
    assert not errors


@pytest.fixture
def notes(example, screen, tmp_path):
    """Open the window; called again, it closes the one before, as for a new day."""
    windows = []

    def open_window():
        if windows:
            windows.pop().quit_program()
        window = example("tk_notes").Notes(warp_embed.demo_path(), tmp_path / "notes")
        windows.append(window)
        window.geometry("+20+20")
        until(lambda: window.assistant is not None, window.update)
        return window
    yield open_window
    for window in windows:
        try:
            window.quit_program()
        except tkinter.TclError:
            pass


def text(window):
    return window.editor.get("1.0", "end-1c")


def write(window, *lines):
    """Type into the editor, key by key for the last line."""
    window.editor.focus_force()
    window.editor.mark_set("insert", "end-1c")
    for n, line in enumerate(lines):
        window.editor.insert("insert", line + "\n" * (n < len(lines) - 1))
    window.update()


def press(window, keys):
    window.editor.focus_force()
    window.update()
    window.editor.event_generate(keys)
    window.update()


def idle(window):
    until(lambda: not window.worker.busy, window.update)


def test_a_question_is_answered_below_it_from_what_stands_above_it(notes, screen, artifacts):
    window = notes()
    assert "Welcome" in window.names and "My pet is a duck." in text(window)
    window.editor.mark_set("insert", "5.3")
    press(window, "<Control-Return>")
    idle(window)
    assert text(window).split("\n")[5] == "→ Your pet is a duck."
    window.editor.insert("end-1c", "\nWhat is the capital of France?\nWhat is my name?")
    window.editor.mark_set("insert", "end-2l")
    press(window, "<Control-Return>")
    idle(window)
    window.editor.mark_set("insert", "end-1c")
    press(window, "<Control-Return>")
    idle(window)
    assert "What is the capital of France?\n→ The capital of France is Paris.\n" in text(window)
    assert text(window).endswith("What is my name?\n→ Your name is Clara.")
    assert "Answered" in window.status["text"] and window.numbers["text"].endswith("MB")
    window.update()
    screen.save(artifacts / "tk_notes.png", window.winfo_rootx(), window.winfo_rooty(), window.winfo_width(),
                window.winfo_height())


def test_asking_again_replaces_the_answer_and_an_edited_fact_counts(notes):
    window = notes()
    window.new()
    write(window, "My name is Clara.", "What is my name?")
    press(window, "<Control-Return>")
    idle(window)
    assert text(window) == "My name is Clara.\nWhat is my name?\n→ Your name is Clara."
    window.editor.delete("1.11", "1.16")
    window.editor.insert("1.11", "Susan")
    window.editor.mark_set("insert", "2.0")
    press(window, "<Control-Return>")
    idle(window)
    assert text(window) == "My name is Susan.\nWhat is my name?\n→ Your name is Susan."


def test_stop_and_other_notes_end_an_answer(notes):
    window = notes()
    window.new()
    write(window, "What is the capital of France?")
    window.editor.event_generate("<Control-Return>")            # without an update, in which a short answer may end
    assert window.action["text"] == "Stop"
    press(window, "<Escape>")
    idle(window)
    stopped = text(window)
    assert "→ The capital of France is Paris.".startswith(stopped.split("\n")[1].rstrip() or "→")
    assert window.action["text"].startswith("Answer")
    window.editor.mark_set("insert", "1.0")
    press(window, "<Control-Return>")
    window.open_note("Welcome")
    welcome = text(window)
    idle(window)
    window.update()
    assert text(window) == welcome                              # what was still to come went nowhere
    window.open_note("Note 1")
    window.editor.mark_set("insert", "1.0")
    press(window, "<Control-Return>")
    idle(window)
    assert text(window) == "What is the capital of France?\n→ The capital of France is Paris."


def test_notes_are_there_the_next_day(notes, tmp_path):
    window = notes()
    window.new()
    write(window, "Buy milk.")
    window = notes()
    assert window.names == ["Note 1", "Welcome"]
    assert text(window) == "Buy milk." and (tmp_path / "notes" / "Note 1.txt").read_text() == "Buy milk."


def test_a_model_that_is_not_there_is_an_error_in_the_window_and_notes_still_open(example, screen, tmp_path):
    window = example("tk_notes").Notes("no such model anywhere", tmp_path)
    until(lambda: not window.worker.busy, window.update)
    assert "no such model" in window.status["text"] and window.action["state"] == "disabled"
    window.quit_program()


def test_quitting_while_it_loads_or_writes(example, screen, tmp_path):
    module = example("tk_notes")
    module.Notes(warp_embed.demo_path(), tmp_path).quit_program()
    window = module.Notes(warp_embed.demo_path(), tmp_path)
    until(lambda: window.assistant is not None, window.update)
    window.editor.mark_set("insert", "5.0")
    window.ask()
    window.quit_program()
    assert "What is my pet?\n→" in (tmp_path / "Welcome.txt").read_text(encoding="utf-8")


def test_the_program_itself(example, screen, tmp_path, monkeypatch):
    module = example("tk_notes")
    monkeypatch.setattr("sys.argv", ["tk_notes.py", "--folder", str(tmp_path)])
    mainloop = module.Notes.mainloop

    def for_a_moment(window):
        window.after(300, window.quit_program)
        mainloop(window)
    monkeypatch.setattr(module.Notes, "mainloop", for_a_moment)
    module.main()
    assert (tmp_path / "Welcome.txt").is_file()
