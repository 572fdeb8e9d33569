"""Notes that answer: write, put the cursor on a question, press Ctrl+Return, and the answer appears below it.

    python examples/tk_notes.py [MODEL] [--folder FOLDER]

The lines above the question are what the assistant knows. Escape stops it. Notes are text files in a folder of yours,
saved as you type; answers in them begin with an arrow.
"""
import argparse
import time
import tkinter as tk
from pathlib import Path
from tkinter import font as tkfont

import platformdirs

import warp_embed
from warp_embed import Model
from warp_embed.integrations.tk import Worker

ARROW = "→ "
PAPER, SIDE, INK, FAINT, LINE, ACCENT, SOFT, ERROR = (
    "#fdfcf9", "#f1efe9", "#2d2a32", "#98938a", "#e2dfd7", "#3d6b5c", "#e3ece7", "#b3413a")
WELCOME = ("Welcome", """My name is Clara.
My pet is a duck.
I like the colour green.

What is my pet?

Put the cursor on the question and press Ctrl+Return.
""")


class Assistant:
    """A conversation that is told the lines of a note. Runs in the worker's thread, all but `cancel`."""

    def __init__(self, model):
        self.chat = model.chat()

    def answer(self, lines, question):
        """Read the lines, then answer; what the conversation was told already is not read again."""
        lines = [*(line for line in lines if line), question]
        told = [message["content"] for message in self.chat.messages if message["role"] == "user"]
        same = 0
        while same < min(len(told), len(lines) - 1) and told[same] == lines[same]:
            same += 1
        for k in range(same, len(lines)):
            options = {"max_tokens": 300 if k == len(lines) - 1 else 24}
            pieces = (self.chat.edit(2 * k, lines[k], **options) if k == same < len(told)
                      else self.chat.ask(lines[k], **options))
            for piece in pieces:
                yield piece if k == len(lines) - 1 else ""          # an empty one is a place to stop

    def cancel(self):
        self.chat.cancel()


class Notes(tk.Tk):
    """The window."""

    def __init__(self, model_name, folder):
        super().__init__(className="notes")
        self.title("Notes")
        self.geometry("900x580")
        self.minsize(560, 320)
        self.configure(background=PAPER)
        self.folder, self.name, self.names = folder, None, []
        self.asking = self.assistant = self.model = None          # asking: the name of the note that is answered
        self.started = self.pieces = 0
        self.worker = Worker(self, token=self.on_token, progress=self.on_progress, finished=self.on_finished,
                             failed=self.on_failed)
        self.build()
        self.protocol("WM_DELETE_WINDOW", self.quit_program)
        for keys, action in (("<Control-Return>", self.ask), ("<Escape>", self.stop), ("<Control-n>", self.new)):
            self.bind(keys, action)
            self.editor.bind(keys, action)
        self.editor.bind("<<Modified>>", self.on_typed)
        self.load_names()
        self.say("Loading the model …", ACCENT)
        self.worker.run(Model.open, model_name, context=2048, on_progress=self.worker.report)

    # ---- what it looks like ----

    def build(self):
        family = next((name for name in ("Segoe UI", "Helvetica Neue", "Cantarell", "DejaVu Sans")
                       if name in tkfont.families(self)), "TkDefaultFont")
        small, text, bold = (family, 10), (family, 12), (family, 12, "bold")
        bar = tk.Frame(self, background=SIDE)
        bar.pack(side="bottom", fill="x")
        tk.Frame(bar, background=LINE, height=1).pack(fill="x")
        self.dot = tk.Label(bar, text="●", background=SIDE, foreground=FAINT, font=small)
        self.dot.pack(side="left", padx=(16, 4), pady=7)
        self.status = tk.Label(bar, background=SIDE, foreground=INK, font=small, anchor="w")
        self.status.pack(side="left", fill="x")
        self.numbers = tk.Label(bar, background=SIDE, foreground=FAINT, font=small)
        self.numbers.pack(side="right", padx=16)
        side = tk.Frame(self, background=SIDE, width=220)
        side.pack(side="left", fill="y")
        side.pack_propagate(False)
        tk.Label(side, text="Notes", background=SIDE, foreground=INK, font=(family, 15, "bold"), anchor="w").pack(
            fill="x", padx=18, pady=(18, 10))
        self.list = tk.Listbox(side, background=SIDE, foreground=INK, font=text, borderwidth=0, highlightthickness=0,
                               selectbackground=SOFT, selectforeground=ACCENT, activestyle="none", exportselection=0)
        self.list.pack(fill="both", expand=True, padx=14)
        self.list.bind("<<ListboxSelect>>", lambda _: self.open_note(self.names[self.list.curselection()[0]])
                       if self.list.curselection() else None)
        self.button(side, "+  New note", self.new, small).pack(fill="x", padx=14, pady=12)
        tk.Frame(self, background=LINE, width=1).pack(side="left", fill="y")
        head = tk.Frame(self, background=PAPER)
        head.pack(fill="x", padx=34, pady=(18, 0))
        self.heading = tk.Label(head, background=PAPER, foreground=INK, font=(family, 19, "bold"), anchor="w")
        self.heading.pack(side="left", fill="x", expand=True)
        self.action = self.button(head, "Answer", self.ask, small)
        self.action.pack(side="right")
        self.editor = tk.Text(self, background=PAPER, foreground=INK, font=text, wrap="word", undo=True, borderwidth=0,
                              highlightthickness=0, padx=34, pady=14, spacing1=3, spacing3=5, insertbackground=ACCENT,
                              insertwidth=2, selectbackground=SOFT, selectforeground=INK)
        self.editor.pack(fill="both", expand=True)
        self.editor.tag_configure("answer", foreground=ACCENT, lmargin1=16, lmargin2=36, font=(family, 12, "italic"))
        self.editor.tag_configure("question", font=bold)
        self.editor.focus_set()

    def button(self, parent, text, command, font):
        return tk.Button(parent, text=text, command=command, font=font, background=ACCENT, foreground="white", padx=14,
                         pady=5, activebackground="#335a4d", activeforeground="white", disabledforeground="#b9cfc6",
                         relief="flat", borderwidth=0, highlightthickness=0, cursor="hand2")

    def say(self, text, colour=FAINT):
        self.status.configure(text=text)
        self.dot.configure(foreground=colour)
        working = self.assistant is not None and self.worker.busy
        self.action.configure(text="Stop" if working else "Answer  Ctrl ↵", command=self.stop if working else self.ask,
                              state="normal" if self.assistant else "disabled")

    # ---- notes ----

    def load_names(self, select=None):
        self.folder.mkdir(parents=True, exist_ok=True)
        if not any(self.folder.glob("*.txt")):
            (self.folder / f"{WELCOME[0]}.txt").write_text(WELCOME[1], encoding="utf-8")
        self.names = sorted((path.stem for path in self.folder.glob("*.txt")), key=str.lower)
        self.list.delete(0, "end")
        self.list.insert("end", *(f"  {name}" for name in self.names))
        self.open_note(select or self.names[0])

    def open_note(self, name):
        if name == self.name:
            return
        self.save()
        self.stop()
        self.name, self.asking = name, None
        self.heading.configure(text=name)
        self.editor.delete("1.0", "end")
        self.editor.insert("1.0", (self.folder / f"{name}.txt").read_text(encoding="utf-8"))
        self.editor.edit_reset()
        self.list.selection_clear(0, "end")
        self.list.selection_set(self.names.index(name))
        self.paint()

    def new(self, _=None):
        number = next(n for n in range(1, 10000) if not (self.folder / f"Note {n}.txt").exists())
        (self.folder / f"Note {number}.txt").touch()
        self.save()
        self.load_names(f"Note {number}")
        return "break"

    def save(self):
        if self.name is not None:
            (self.folder / f"{self.name}.txt").write_text(self.editor.get("1.0", "end-1c"), encoding="utf-8")

    def on_typed(self, _):
        if self.editor.edit_modified():
            self.editor.edit_modified(False)
            self.paint()
            self.after_idle(self.save)

    def paint(self):
        """Answers in green, questions in bold."""
        for tag in ("answer", "question"):
            self.editor.tag_remove(tag, "1.0", "end")
        for n, line in enumerate(self.editor.get("1.0", "end-1c").split("\n"), 1):
            tag = "answer" if line.startswith(ARROW) else "question" if line.rstrip().endswith("?") else None
            if tag:
                self.editor.tag_add(tag, f"{n}.0", f"{n}.end")

    # ---- answers ----

    def ask(self, _=None):
        """Answer the line of the cursor, in place of an answer that is there."""
        row = int(self.editor.index("insert").split(".")[0])
        lines = self.editor.get("1.0", "end-1c").split("\n")
        question = lines[row - 1].strip()
        if self.assistant is None or self.worker.busy or not question or question.startswith(ARROW.strip()):
            return "break"
        if row < len(lines) and lines[row].startswith(ARROW.strip()):
            self.editor.delete(f"{row + 1}.0", f"{row + 1}.end")
        else:
            self.editor.insert(f"{row}.end", "\n")
        self.editor.insert(f"{row + 1}.0", ARROW, "answer")
        self.editor.mark_set("answer", f"{row + 1}.end")
        known = [line.strip() for line in lines[:row - 1] if not line.startswith(ARROW.strip())]
        self.asking, self.started, self.pieces = self.name, time.monotonic(), 0
        self.worker.run(self.assistant.answer, known, question)
        self.say("Reading …", ACCENT)
        return "break"

    def stop(self, _=None):
        self.worker.stop()
        return "break"

    def on_token(self, text):
        if text and self.asking == self.name:
            self.editor.insert("answer", text.replace("\n", " "), "answer")
            self.editor.see("answer")
            self.pieces += 1
            self.say("Writing …", ACCENT)

    def on_progress(self, done, total):
        self.say(f"Loading the model … {done / total:.0%}", ACCENT)

    def on_finished(self, result):
        if isinstance(result, Model):
            self.model, self.assistant = result, Assistant(result)
            self.say("Ready. Everything stays on this machine.")
        else:
            seconds = time.monotonic() - self.started
            self.say(f"Answered in {seconds:.2g} s." if self.pieces else "Stopped.")
            self.save()
            self.asking = None
        if self.model is not None:
            self.numbers.configure(text=f"{self.model.memory()['total'] / 1e6:.0f} MB")

    def on_failed(self, error):
        self.say(str(error), ERROR)

    def quit_program(self):
        """Save, stop, free the memory."""
        self.save()
        self.worker.drop()
        if self.model is not None:
            self.model.close()
        self.destroy()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=warp_embed.demo_path())
    parser.add_argument("--folder", type=Path, default=Path(platformdirs.user_documents_dir(), "Answering notes"))
    args = parser.parse_args()
    Notes(args.model, args.folder).mainloop()


if __name__ == "__main__":
    main()
