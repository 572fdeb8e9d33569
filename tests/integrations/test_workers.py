"""Both workers, in the loop that each is for: what arrives, when it may be stopped, what happens when the host ends."""
import asyncio
import contextlib
import re
import subprocess
import sys
import textwrap
import threading

import pytest
from conftest import QUESTION, ROOT, until

import warp_embed
from warp_embed.integrations import _job

ANSWER = "The capital of France is Paris."


class Host:
    """A loop with a worker in it that writes down what arrives, and in which thread."""

    def __init__(self, worker, turn, close):
        self.worker, self._turn, self.close = worker, turn, close
        self.events, self.threads = [], set()

    def note(self, name):
        def told(*values):
            self.events.append((name, *values))
            self.threads.add(threading.current_thread())
        return told

    def of(self, name):
        return [values for kind, *values in self.events if kind == name]

    def until(self, condition):
        until(condition, self._turn)

    def run(self, *args, **kwargs):
        self.events.clear()
        self.worker.run(*args, **kwargs)
        self.until(lambda: not self.worker.busy)
        return self.events[-1]


@pytest.fixture(params=["qt", "tk"])
def host(request):
    if request.param == "qt":
        application = request.getfixturevalue("qt_application")
        from warp_embed.integrations.qt import QtCore, Worker
        window = QtCore.QObject()
        worker = Worker(window)

        def close():
            nonlocal window
            window.deleteLater()
            application.sendPostedEvents(None, QtCore.QEvent.Type.DeferredDelete.value)
        host = Host(worker, application.processEvents, close)
        for name in ("token", "progress", "finished", "failed"):
            getattr(worker, name).connect(host.note(name))
    else:
        root = request.getfixturevalue("tk_root")
        from warp_embed.integrations.tk import Worker
        host = Host(None, root.update, root.destroy)
        host.worker = Worker(root, **{name: host.note(name) for name in ("token", "progress", "finished", "failed")})
    host.window = window if request.param == "qt" else root         # lives as long as the test
    yield host
    host.worker = None


def endless():
    """Tokens without end."""
    n = 0
    while True:
        yield (n := n + 1)


def test_a_reply_arrives_in_pieces_in_the_thread_of_the_loop(host, model):
    with model.chat() as chat:
        assert host.run(chat.ask, QUESTION) == ("finished", None)
        assert "".join(text for text, in host.of("token")) == ANSWER and len(host.of("token")) > 3
        assert host.threads == {threading.main_thread()} and chat.finish_reason == "stop"


def test_loading_tells_its_progress_and_gives_the_model(host):
    kind, model = host.run(warp_embed.Model.open, warp_embed.demo_path(), context=64, threads=1,
                           on_progress=host.worker.report)
    with model:
        done = [done for done, _ in host.of("progress")]
        assert kind == "finished" and done == sorted(done) and host.of("progress")[-1] == [done[-1], done[-1]]


def test_loading_can_be_stopped(host):
    host.worker.run(warp_embed.Model.open, warp_embed.demo_path(), on_progress=lambda *state: (
        host.worker.stop(), host.worker.report(*state)))
    host.until(lambda: not host.worker.busy)
    assert host.events == [("finished", None)]


def test_an_error_arrives_as_it_is_and_the_worker_goes_on(host, model):
    kind, error = host.run(warp_embed.Model.open, "no such model anywhere")
    assert kind == "failed" and isinstance(error, FileNotFoundError)
    with model.chat() as chat:
        assert host.run(chat.ask, QUESTION)[0] == "finished"


def test_one_call_at_a_time(host):
    host.worker.run(endless)
    with pytest.raises(RuntimeError, match="busy"):
        host.worker.run(endless)
    host.worker.stop()
    assert host.worker.wait(10)
    host.until(lambda: not host.worker.busy)


@pytest.mark.parametrize("pieces", [0, 1, 5])
def test_stop_ends_a_reply_and_the_next_one_is_right(host, model, pieces):
    with model.chat() as chat:
        host.worker.run(chat.ask, QUESTION, max_tokens=300)
        host.until(lambda: len(host.of("token")) >= pieces)
        host.worker.stop()
        host.worker.stop()
        host.until(lambda: not host.worker.busy)
        assert host.events[-1] == ("finished", None)
        host.run(chat.ask, QUESTION)
        assert "".join(text for text, in host.of("token")) == ANSWER


def test_stop_holds_even_if_the_call_forgets_a_cancel(host):
    """A session clears its flag when a call begins: a cancel just before that is repeated."""
    class Forgetful:
        cancelled = 0
        ended = threading.Event()

        def cancel(self):
            self.cancelled += 1
            if self.cancelled == 3:
                self.ended.set()

        def work(self):
            self.ended.wait(30)
    forgetful = Forgetful()
    host.worker.run(forgetful.work)
    host.worker.stop()
    host.until(lambda: not host.worker.busy)
    assert forgetful.cancelled >= 3


def test_a_producer_that_is_too_fast_does_not_hold_the_loop(host):
    """Every turn of the loop ends, though there is always more; and it is not ahead by more than it may be."""
    host.worker.run(endless)
    host.until(lambda: len(host.of("token")) > 1000)
    assert host.worker._job._events.qsize() <= _job._AHEAD
    host.worker.stop()
    host.worker.wait(10)
    host.until(lambda: not host.worker.busy)
    assert [n for n, in host.of("token")] == list(range(1, len(host.of("token")) + 1))


def test_closing_the_window_ends_the_work_and_nothing_arrives_afterwards(host):
    host.worker.run(endless)
    host.until(lambda: host.of("token"))
    job = host.worker._job
    host.close()
    seen = len(host.events)
    assert job.wait(10) and len(host.events) == seen and not workers()


def test_what_is_dropped_says_nothing_more(host):
    assert host.worker.drop()                                   # nothing runs
    host.worker.run(endless)
    host.until(lambda: host.of("token"))
    assert host.worker.drop(10) and not host.worker.busy and not workers()
    seen = list(host.events)
    assert host.run(len, "abc") == ("finished", 3)
    assert host.events == [("finished", 3)] and all(name == "token" for name, *_ in seen)


def test_what_finished_leads_to_may_start_the_next_call(host):
    ends = []
    original = host.note("finished")

    def again(result):
        original(result)
        ends.append(result)
        if len(ends) < 3:
            host.worker.run(len, "abc")
    if hasattr(host.worker, "finished"):
        host.worker.finished.connect(again)
    else:
        host.worker._calls["finished"] = again
    host.worker.run(len, "abc")
    host.until(lambda: len(ends) == 3 and not host.worker.busy)
    assert ends == [3, 3, 3]


def test_waiting_for_a_call_does_not_wait_for_the_loop(host):
    """The thread that waits is the one that would fetch the tokens."""
    host.worker.run(lambda: iter(range(3 * _job._AHEAD)))
    assert host.worker.wait(30)
    host.until(lambda: not host.worker.busy)
    assert len(host.of("token")) == 3 * _job._AHEAD


def workers():
    return [thread for thread in threading.enumerate() if thread.name == "warp_embed job"]


def test_no_thread_is_left(host):
    host.run(len, "abc")
    host.until(lambda: not workers())


def test_a_program_that_ends_during_a_reply_ends():
    """The interpreter waits for threads; ours notices that it does."""
    program = f"""
        import time
        from warp_embed.integrations._job import Job
        def endless():
            while True:
                time.sleep(0.001)
                yield 1
        job = Job(endless, (), {{}})
        job.start()
        assert {_job.PERIOD_MS}
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=30)


@pytest.mark.parametrize("name", ["PySide6", "PyQt6"])
def test_the_binding_that_is_imported_is_the_one_used(name):
    pytest.importorskip(f"{name}.QtCore", exc_type=ImportError)
    code = f"import {name}.QtCore, warp_embed.integrations.qt as qt; print(qt.QtCore.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{name}.QtCore"


def test_the_asyncio_example_of_the_docs(model):
    text = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
    code, = (code for code in re.findall(r"```python\n(.*?)```", text, re.S) if "async def" in code)
    names = {"asyncio": asyncio}
    exec(code, names)

    async def collect(chat):
        return "".join([piece async for piece in names["answer"](chat, QUESTION)])

    async def both():
        with model.chat() as chat:
            task = asyncio.create_task(collect(chat))
            await asyncio.sleep(0.005)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):       # or it was faster
                await task
            return await collect(chat)
    assert asyncio.run(both()) == ANSWER


def test_without_a_binding_the_error_says_what_to_install():
    code = "import sys; sys.modules.update(PySide6=None, PyQt6=None); import warp_embed.integrations.qt"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'warp_embed[qt]'" in done.stderr
