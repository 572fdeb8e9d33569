"""examples/qt_chat.py, driven as a person would: write, stop, retry, edit, change conversations, quit and come back."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import QUESTION, ROOT

import warp_embed

ANSWER = "The capital of France is Paris."


@pytest.fixture
def chat(qt_application, qt, example, tmp_path):
    """Open the window; called again, it closes the one before, as for a new day."""
    windows = []

    def open_window(model=None):
        if windows:
            windows.pop().close()
        window = example("qt_chat").Window(model or warp_embed.demo_path(), tmp_path)
        windows.append(window)
        window.show()
        idle(qt, window)
        return window
    yield open_window
    for window in windows:
        window.close()
        window.deleteLater()
    qt_application.processEvents()


def idle(qt, window):
    qt(lambda: not any(worker.busy for worker in (window.worker, window.keeper, window.loader)))


def bubbles(window):
    """(role, text) of the bubbles on the page."""
    module = sys.modules["qt_chat"]
    return [(bubble.objectName(), bubble.text()) for bubble in window.scroll.widget().findChildren(module.Bubble)]


def press(widget, key, modifiers=None):
    module = sys.modules["qt_chat"]
    none = module.Qt.KeyboardModifier.NoModifier
    for kind in (module.QtCore.QEvent.Type.KeyPress, module.QtCore.QEvent.Type.KeyRelease):
        event = module.QtGui.QKeyEvent(kind, key, modifiers or none)
        module.QtWidgets.QApplication.sendEvent(widget, event)


def picture(window, file):
    """What a person sees, once the layout has settled."""
    for _ in range(10):
        sys.modules["qt_chat"].QtWidgets.QApplication.processEvents()
    window.grab().save(str(file))


def type_and_send(window, text):
    window.composer.insertPlainText(text)
    press(window.composer, sys.modules["qt_chat"].Qt.Key.Key_Return)


def link(window, text):
    buttons = window.scroll.widget().findChildren(sys.modules["qt_chat"].QtWidgets.QPushButton)
    return next(button for button in buttons if text in button.text())


def test_a_conversation(chat, qt, artifacts):
    window = chat()
    assert window.state.text() == "Ready" and window.button.text() == "Send"
    picture(window, artifacts / "qt_chat_empty.png")
    type_and_send(window, "Hello, my name is Ada.")
    assert window.worker.busy and window.button.text() == "Stop" and window.state.text() == "Thinking …"
    assert not window.composer.toPlainText()
    idle(qt, window)
    for question in (QUESTION, "What is the opposite of hot?", "What is my name?"):
        type_and_send(window, question)
        idle(qt, window)
    assert bubbles(window)[0] == ("user", "Hello, my name is Ada.")
    assert bubbles(window)[2:] == [("user", QUESTION), ("assistant", ANSWER),
                                   ("user", "What is the opposite of hot?"),
                                   ("assistant", "The opposite of hot is cold."),
                                   ("user", "What is my name?"), ("assistant", "Your name is Ada.")]
    assert "tokens/s" in window.numbers.text() and "MB" in window.numbers.text()
    picture(window, artifacts / "qt_chat.png")


def test_stop_then_retry(chat, qt, artifacts):
    window = chat()
    type_and_send(window, QUESTION)
    window.button.click()                                       # says Stop now
    idle(qt, window)
    assert window.button.text() == "Send"
    said = bubbles(window)
    assert said[0] == ("user", QUESTION) and ANSWER.startswith(said[1][1].rstrip("…"))
    link(window, "Retry").click()
    idle(qt, window)
    assert bubbles(window) == [("user", QUESTION), ("assistant", ANSWER)]
    assert len(window.chat.messages) == 2


def test_edit_a_question(chat, qt, artifacts):
    window = chat()
    for question in (QUESTION, "What is the opposite of hot?"):
        type_and_send(window, question)
        idle(qt, window)
    link(window, "Edit").click()
    assert window.composer.toPlainText() == "What is the opposite of hot?" and window.hint.isVisible()
    press(window.composer, sys.modules["qt_chat"].Qt.Key.Key_Escape)
    assert not window.composer.toPlainText() and not window.hint.isVisible()
    window.edit(0)
    picture(window, artifacts / "qt_chat_edit.png")
    type_and_send(window, "What is the capital of Italy?")      # what was there is selected, so this replaces it
    idle(qt, window)
    assert bubbles(window) == [("user", "What is the capital of Italy?"),
                               ("assistant", "The capital of Italy is Rome.")]


def test_conversations_are_kept_and_taken_up(chat, qt, tmp_path, artifacts):
    window = chat()
    type_and_send(window, "My name is Susan.")
    idle(qt, window)
    first = window.name
    window.show_chat(None)
    assert bubbles(window) == [] and window.list.count() == 1
    window.name = "9999-12-31 00.00.00 Later"                   # than the first, whatever the clock says
    type_and_send(window, QUESTION)
    idle(qt, window)
    window = chat()                                             # the next day
    assert bubbles(window) == [("user", QUESTION), ("assistant", ANSWER)]
    assert [window.list.item(i).text() for i in range(2)] == ["Later", "My name is Susan"]
    window.show_chat(first)
    idle(qt, window)
    type_and_send(window, "What is my name?")
    idle(qt, window)
    assert bubbles(window)[-1] == ("assistant", "Your name is Susan.")
    for file in Path(tmp_path).glob("*.chat"):
        file.write_bytes(file.read_bytes()[:-1])
    window.chat.close()
    window.chat = None                                          # so that it does not save it once more
    window = chat()
    assert bubbles(window)[-1][0] == "error" and window.button.isEnabled()


def test_closing_the_window_while_it_loads_or_answers(chat, qt, example, tmp_path):
    window = example("qt_chat").Window(warp_embed.demo_path(), tmp_path)
    window.close()
    assert window.model is None
    window = chat()
    type_and_send(window, QUESTION)
    window = chat()
    said = bubbles(window)
    assert not said or (said[0] == ("user", QUESTION) and ANSWER.startswith(said[1][1].rstrip("…")))


def test_the_next_question_need_not_wait_until_the_last_is_kept(chat, qt):
    window = chat()
    for question in ("My pet is a duck.", QUESTION, "What is my pet?"):
        type_and_send(window, question)
        qt(lambda: not window.worker.busy)
    assert bubbles(window)[-1] == ("assistant", "Your pet is a duck.")
    window = chat()
    assert len(bubbles(window)) == 6


def test_the_program_itself(qt_application, tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples")!r})
sys.argv = ["qt_chat.py", "--folder", {str(tmp_path)!r}]
import qt_chat
show = qt_chat.Window.show
def show_for_a_moment(window):
    show(window)
    window.loader.finished.connect(window.close)
qt_chat.Window.show = show_for_a_moment
qt_chat.main()
"""
    where = {"PYTHONPATH": str(Path(warp_embed.__file__).parents[1]), "QT_QPA_PLATFORM": "offscreen"}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **where}, capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr


def test_a_model_that_is_not_there_is_an_error_in_the_window(chat, artifacts):
    window = chat("no such model anywhere")
    (role, text), = bubbles(window)
    assert role == "error" and "no such model" in text and not window.button.isEnabled()
    type_and_send(window, "Hello?")
    assert bubbles(window) == [(role, text)]
    picture(window, artifacts / "qt_chat_error.png")
