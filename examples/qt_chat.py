"""A chat window: streaming, Stop, Retry, edit, several conversations that are kept from one day to the next.

    python examples/qt_chat.py [MODEL] [--folder FOLDER] [--memory SIZE]

Needs PySide6 or PyQt6. Only one conversation is in memory: the others are files, and changing to one takes
milliseconds, since a conversation's state has a fixed size. Double-click a question of yours to edit it.
"""
import argparse
import re
import sys
import time
from pathlib import Path

try:
    from PySide6 import QtCore, QtGui, QtWidgets
except ImportError:
    from PyQt6 import QtCore, QtGui, QtWidgets

import warp_embed
from warp_embed import Chat, Model, Sampling
from warp_embed.integrations.qt import Worker

Qt = QtCore.Qt
RETRY = Sampling(temperature=0.8, top_p=0.95)       # at temperature 0 the answer would be the same again
STYLE = """
* { font-size: 14px; color: #23262f; }
QMainWindow, #page, QScrollArea { background: #ffffff; border: none; }
#side { background: #f3f4f7; border-right: 1px solid #e4e6eb; }
QListWidget { background: transparent; border: none; outline: none; }
QListWidget::item { padding: 9px 10px; border-radius: 8px; }
QListWidget::item:selected { background: #dfe3f7; color: #2b3a8c; }
QListWidget::item:hover:!selected { background: #e9ebf0; }
#new { background: #ffffff; border: 1px solid #d5d8df; border-radius: 8px; padding: 8px; }
#new:hover { border-color: #9aa5e0; }
#user, #assistant, #error { background: #e6eafb; border-radius: 14px; padding: 10px 14px; }
#assistant { background: #f5f6f8; } #error { background: #fdecea; color: #97231b; }
#composer { border: 1px solid #d5d8df; border-radius: 14px; }
QPlainTextEdit { border: none; background: transparent; padding: 4px; }
#send { background: #4557c8; color: white; border: none; border-radius: 10px; padding: 8px 18px; font-weight: 600; }
#send:hover { background: #3848b0; } #send:disabled { background: #c4c9e4; } #send[stop="true"] { background: #23262f; }
#note, #link { color: #6a7080; font-size: 12px; }
#link { background: transparent; border: none; padding: 2px 6px; } #link:hover { color: #2b3a8c; }
QStatusBar { background: #f3f4f7; border-top: 1px solid #e4e6eb; }
QStatusBar QLabel { color: #6a7080; font-size: 12px; padding: 2px 8px; }
QScrollBar:vertical { width: 8px; background: transparent; }
QScrollBar::handle { background: #d5d8df; border-radius: 4px; }
QScrollBar::add-line, QScrollBar::sub-line { height: 0; }
"""
WELCOME = """<p style="font-size: 22px; font-weight: 600">What would you like to know?</p>
<p style="color: #8a8f9c">It runs on this machine. Nothing leaves it.</p>"""


def row(*widgets, margins=(0, 0, 0, 0)):
    """Widgets side by side; a number is empty space."""
    box = QtWidgets.QHBoxLayout()
    box.setContentsMargins(*margins)
    for widget in widgets:
        box.addStretch(widget) if isinstance(widget, int) else box.addWidget(widget, 0, Qt.AlignmentFlag.AlignBottom)
    return box


class Composer(QtWidgets.QPlainTextEdit):
    """Return sends, Shift+Return starts a new line, Escape leaves editing."""

    def __init__(self, send, leave):
        super().__init__()
        self._send, self._leave = send, leave
        self.setPlaceholderText("Write a message")
        self.setFixedHeight(44)
        self.textChanged.connect(self.grow)

    def grow(self):
        self.setFixedHeight(26 + 18 * max(1, min(6, round(self.document().size().height()))))

    def keyPressEvent(self, event):
        shift = event.modifiers() & Qt.KeyboardModifier.ShiftModifier
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and not shift:
            self._send()
        elif event.key() == Qt.Key.Key_Escape:
            self._leave()
        else:
            super().keyPressEvent(event)


class Bubble(QtWidgets.QLabel):
    """One message."""

    def __init__(self, role, text, edit=None):
        super().__init__()
        self.setObjectName(role)
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setWordWrap(True)
        self.setIndent(0)
        self.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self._edit = edit
        if edit:
            self.setToolTip("Double-click to edit")
        self.show_text(text)

    def show_text(self, text):
        """As wide as the text needs, up to a column that reads well."""
        self.setText(text)
        font = self.font()
        font.setPixelSize(14)
        wide = max(QtGui.QFontMetrics(font).horizontalAdvance(line) for line in text.split("\n"))
        self.setFixedWidth(min(560, wide + 31))

    def mouseDoubleClickEvent(self, event):
        if self._edit:
            self._edit()
        else:
            super().mouseDoubleClickEvent(event)


class Window(QtWidgets.QMainWindow):
    def __init__(self, model_name, folder, memory="auto"):
        super().__init__()
        self.folder, self.model, self.chat, self.name = folder, None, None, None
        self.reply, self.given, self.editing, self.kept = None, "", None, True
        folder.mkdir(parents=True, exist_ok=True)
        self.worker, self.keeper, self.loader = Worker(self), Worker(self), Worker(self)
        self.worker.token.connect(self.on_token)                # it talks,
        self.worker.finished.connect(self.on_answered)
        self.keeper.finished.connect(self.on_kept)              # it writes conversations to files,
        self.loader.progress.connect(lambda done, total: self.say(f"Loading the model … {done / total:.0%}"))
        self.loader.finished.connect(self.on_loaded)            # and it opens them, and the model
        for worker in (self.worker, self.keeper, self.loader):
            worker.failed.connect(self.on_error)
        self.build()
        self.say("Loading the model …")
        self.loader.run(Model.open, model_name, memory=memory, context=2048, on_progress=self.loader.report)

    # ---- what it looks like ----

    def build(self):
        self.setWindowTitle("Chat")
        self.resize(980, 680)
        self.setMinimumSize(880, 400)
        self.setStyleSheet(STYLE)
        side = QtWidgets.QWidget(objectName="side")
        side.setFixedWidth(220)
        self.list = QtWidgets.QListWidget()
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.list.itemClicked.connect(lambda item: self.show_chat(item.data(Qt.ItemDataRole.UserRole)))
        new = QtWidgets.QPushButton("+  New chat", objectName="new")
        new.clicked.connect(lambda: self.show_chat(None))
        column = QtWidgets.QVBoxLayout(side)
        column.setContentsMargins(12, 14, 12, 12)
        column.addWidget(new)
        column.addWidget(self.list)
        page = QtWidgets.QWidget(objectName="page")
        self.scroll = QtWidgets.QScrollArea(widgetResizable=True)
        bar = self.scroll.verticalScrollBar()
        bar.rangeChanged.connect(lambda _, end: bar.setValue(end))
        self.composer = Composer(self.send, self.leave_editing)
        self.button = QtWidgets.QPushButton("Send", objectName="send", enabled=False)
        self.button.clicked.connect(lambda: self.worker.stop() if self.worker.busy else self.send())
        frame = QtWidgets.QFrame(objectName="composer")
        frame.setSizePolicy(QtWidgets.QSizePolicy.Policy.Preferred, QtWidgets.QSizePolicy.Policy.Fixed)
        frame.setLayout(row(self.composer, self.button, margins=(10, 6, 8, 6)))
        self.hint = QtWidgets.QLabel("Editing a question · Escape leaves it", objectName="note", visible=False)
        column = QtWidgets.QVBoxLayout(page)
        column.setContentsMargins(28, 8, 28, 16)
        column.addWidget(self.scroll, 1)
        column.addWidget(self.hint)
        column.addWidget(frame)
        split = QtWidgets.QSplitter(handleWidth=0)
        split.addWidget(side)
        split.addWidget(page)
        self.setCentralWidget(split)
        self.state, self.numbers = QtWidgets.QLabel(), QtWidgets.QLabel()
        self.statusBar().addWidget(self.state)
        self.statusBar().addPermanentWidget(self.numbers)
        self.statusBar().setSizeGripEnabled(False)
        self.composer.setFocus()

    def say(self, text):
        """What is going on, and what it takes, in the status bar."""
        self.state.setText(text)
        busy = self.worker.busy
        self.button.setText("Stop" if busy else "Send")
        self.button.setProperty("stop", busy)
        self.button.style().polish(self.button)
        self.button.setEnabled(self.chat is not None)
        if self.chat is not None:
            seconds = sum(token.stats.total_ms for token in self.chat.reply) / 1000
            speed = f"{len(self.chat.reply) / seconds:.0f} tokens/s  ·  " if seconds and not busy else ""
            self.numbers.setText(f"{speed}{self.chat.session.position} of {self.chat.session.context} tokens  ·  "
                                 f"{self.model.memory()['total'] / 1e6:.0f} MB")

    def show_messages(self, messages, done=True):
        """Build the page anew; when all is said, with what can be done about the last answer."""
        page = QtWidgets.QWidget(objectName="page")
        self.column = QtWidgets.QVBoxLayout(page)
        self.column.setContentsMargins(0, 16, 8, 16)
        self.column.setSpacing(10)
        self.column.setAlignment(Qt.AlignmentFlag.AlignTop)
        if not messages:
            self.column.setAlignment(Qt.AlignmentFlag.AlignVCenter)
            self.column.addWidget(QtWidgets.QLabel(WELCOME, alignment=Qt.AlignmentFlag.AlignCenter))
        for i, message in enumerate(messages):
            self.add(Bubble(message["role"], message["content"] or "…",
                            (lambda i=i: self.edit(i)) if done and message["role"] == "user" else None))
        if messages and done:
            links = [QtWidgets.QPushButton(text, objectName="link", cursor=Qt.CursorShape.PointingHandCursor)
                     for text in ("↻ Retry", "✎ Edit")]
            links[0].clicked.connect(self.retry)
            links[1].clicked.connect(lambda: self.edit(len(messages) - 2))
            self.column.addLayout(row(*links, 1))
        self.scroll.setWidget(page)

    def add(self, bubble):
        """A bubble at its side of the page."""
        self.column.addLayout(row(1, bubble) if bubble.objectName() == "user" else row(bubble, 1))

    # ---- talking ----

    def send(self):
        text = self.composer.toPlainText().strip()
        if self.chat is None or self.worker.busy or not text:
            return
        self.composer.clear()
        if self.editing is None:
            self.start(text, self.chat.ask, text)
        else:
            self.start(text, self.chat.edit, self.editing, text)

    def retry(self):
        if not self.worker.busy:
            self.start(self.chat.messages[-2]["content"], self.chat.retry, sampling=RETRY)

    def edit(self, index):
        if not self.worker.busy:
            self.editing = index
            self.composer.setPlainText(self.chat.messages[index]["content"])
            self.composer.selectAll()
            self.composer.setFocus()
            self.hint.show()

    def leave_editing(self):
        if self.editing is not None:
            self.composer.clear()
        self.editing = None
        self.hint.hide()

    def start(self, text, work, *args, **options):
        """Show a question with an empty reply, and have it answered in the worker's thread."""
        self.keeper.drop()
        self.kept = False
        keep = {self.chat.ask: None, self.chat.edit: self.editing, self.chat.retry: -2}[work]
        self.leave_editing()
        self.show_messages(self.chat.messages[:keep] + [{"role": "user", "content": text}], done=False)
        self.given, self.reply = "", Bubble("assistant", "…")
        self.add(self.reply)
        self.worker.run(work, *args, max_tokens=600, overflow="drop_oldest", **options)
        self.say("Thinking …")

    def on_token(self, text):
        if not self.given:
            self.say("Writing …")
        self.given += text
        self.reply.show_text(self.given)

    def on_answered(self):
        if self.chat.messages:
            self.keeper.run(self.chat.save, self.file())
        self.show_messages(self.chat.messages)
        self.say({"stop": "Ready", "length": "Stopped after 600 tokens", "context": "This conversation is full"}.get(
            self.chat.finish_reason, "Stopped"))

    def on_error(self, error):
        if self.model is not None and self.chat is None:        # a conversation that cannot be opened
            self.name, self.chat = None, self.model.chat()
        self.show_messages(self.chat.messages if self.chat is not None else [])
        self.add(Bubble("error", str(error)))
        self.say("Something went wrong")

    # ---- conversations ----

    def on_loaded(self, result):
        if self.model is None:
            self.model = result
            self.show_chat(next((path.stem for path in self.files()), None))
        else:
            self.take(result)

    def show_chat(self, name):
        """Change to a conversation of the list; None: to a new one."""
        if self.model is None or self.loader.busy or (name is not None and name == self.name):
            return
        self.leave()
        self.name = name
        if name is None:
            self.on_loaded(self.model.chat())
        else:
            self.say("Opening …")
            self.loader.run(Chat.restore, self.model, self.file())

    def take(self, chat):
        self.chat = chat
        self.show_messages(chat.messages)
        self.show_names()
        self.say("Ready")

    def show_names(self):
        """The list of conversations: file names without their times."""
        self.list.clear()
        for path in self.files():
            item = QtWidgets.QListWidgetItem(path.stem[20:])
            item.setData(Qt.ItemDataRole.UserRole, path.stem)
            self.list.addItem(item)
            item.setSelected(path.stem == self.name)

    def files(self):
        return sorted(self.folder.glob("*.chat"), reverse=True)

    def file(self):
        """Where this conversation is kept."""
        if self.name is None:
            title = re.sub(r"[^\w ',-]", "", self.chat.messages[0]["content"])[:40].strip() or "Chat"
            self.name = f"{time.strftime('%Y-%m-%d %H.%M.%S')} {title}"
        return self.folder / f"{self.name}.chat"

    def on_kept(self):
        self.kept = True
        self.show_names()

    def leave(self):
        """End what is going on, keep the conversation in its file, and free its memory."""
        self.worker.drop()
        self.keeper.drop()
        self.leave_editing()
        if self.chat is not None:
            if not self.kept and self.chat.messages:
                self.chat.save(self.file())
                self.kept = True
            self.chat.close()
            self.chat = None

    def closeEvent(self, event):
        self.hide()                                     # at once; what is left takes a moment
        self.loader.drop()
        self.leave()
        if self.model is not None:
            self.model.close()
        event.accept()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=warp_embed.demo_path())
    parser.add_argument("--folder", type=Path, help="where conversations are kept")
    parser.add_argument("--memory", default="auto", help='ceiling, such as "24GB" (default: what is free)')
    args = parser.parse_args()
    application = QtWidgets.QApplication(sys.argv[:1])
    application.setApplicationName("warp_embed chat")
    place = QtCore.QStandardPaths.writableLocation(QtCore.QStandardPaths.StandardLocation.AppDataLocation)
    window = Window(args.model, args.folder or Path(place), args.memory)
    window.show()
    sys.exit(application.exec())


if __name__ == "__main__":
    main()
