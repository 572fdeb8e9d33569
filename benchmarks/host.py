"""python -m benchmarks host: what the program around the model feels, beside a control run without the model.

The control keeps as many native threads busy as the model has, none of which wants the GIL. What a heartbeat or a frame
loses beyond the control is ours; the rest is the machine's.
"""
import contextlib
import hashlib
import io
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import warp_embed
from benchmarks import overhead, report
from benchmarks.native import machine
from warp_embed import Model, Sampling

TICK_S, FRAME_S, BUDGET_S = 0.002, 1 / 60, 0.004
DRAW_S = 0.005              # of each frame is spent in Python, as a game would
SALT_ROUNDS = 100_000       # for the calibration of `burn`


def add_parser(commands):
    parser = commands.add_parser("host", help="heartbeats, frames and budgets of a program around the model")
    parser.add_argument("--model", default=warp_embed.demo_path(), help="a container (default: the demo model)")
    parser.add_argument("--threads", type=int, metavar="N", help="of the model; default: what the plan says")
    parser.add_argument("--seconds", type=float, default=3, metavar="S", help="for each measurement (default 3)")
    parser.add_argument("--context", type=int, default=4096, metavar="N")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    report.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments):
    rows = []
    with Model.open(arguments.model, context=arguments.context, threads=arguments.threads) as model:
        for part in arguments.only:
            rows += PARTS[part](model, arguments)
    report.write(arguments, {"command": "host", **machine(), "model": model.path, "threads": model.plan.threads,
                             "rows": rows}, plot)
    return 0


# ---- the control ----

def burn(seconds):
    """Keep a core busy without the GIL."""
    hashlib.pbkdf2_hmac("sha256", b"key", b"salt", max(1, int(seconds * rate())))


def rate(known=[]):         # noqa: B006  (measured once)
    if not known:
        begin = time.perf_counter()
        hashlib.pbkdf2_hmac("sha256", b"key", b"salt", SALT_ROUNDS)
        known.append(SALT_ROUNDS / (time.perf_counter() - begin))
    return known[0]


@contextlib.contextmanager
def busy(n):
    """n native threads that compute until the end of the block."""
    over = threading.Event()

    def work():
        while not over.is_set():
            burn(0.5)
    threads = [threading.Thread(target=work) for _ in range(n)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


# ---- heartbeats ----

class Heartbeat:
    """A thread that wants to run every 2 ms; `late` are the seconds by which it did not."""

    def __enter__(self):
        self.late, self._over = [], threading.Event()
        self._thread = threading.Thread(target=self._beat)
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._over.set()
        self._thread.join()

    def _beat(self):
        last = time.perf_counter()
        while not self._over.is_set():
            time.sleep(TICK_S)
            now = time.perf_counter()
            self.late.append(now - last - TICK_S)
            last = now


def calls(model):
    """Every public call that may take long: name -> a function to be repeated."""
    session, prompt = model.session(), [i % 500 + 1 for i in range(min(1024, model.plan.context // 2))]
    session.prefill(prompt)
    saved, text = io.BytesIO(), "The quick brown fox jumps over the lazy dog. " * 2_000
    session.save(saved)
    encoded = model.tokenizer.encode(text)

    def fresh(work):
        with model.session() as other:
            work(other)

    def step():
        if session.position + 1 >= session.context:
            session.rewind(len(prompt))
        session.step()
    return {
        "open, close": lambda: Model.open(model.path, context=256, threads=model.plan.threads).close(),
        "prefill": lambda: fresh(lambda other: other.prefill(prompt)),
        "step": step,
        "generate": lambda: fresh(lambda other: list(other.generate(prompt[:8], max_tokens=64))),
        "chat": lambda: list(model.chat().ask("What is the capital of France?", max_tokens=64)),
        "rewind": lambda: session.rewind(len(prompt) - 7),
        "sync": lambda: session.sync(prompt),
        "checkpoint": session.checkpoint,
        "fork": lambda: session.fork().close(),
        "save": lambda: session.save(io.BytesIO()),
        "restore": lambda: model.restore(io.BytesIO(saved.getvalue())).close(),
        "encode": lambda: model.tokenizer.encode(text),
        "decode": lambda: model.tokenizer.decode(encoded),
        "trim": model.trim,
    }


def repeat(call, seconds):
    """Call again and again. The pauses let short calls be told from a loop that is busy in Python itself."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        call()
        time.sleep(TICK_S / 2)


def heartbeats(model, arguments):
    rows = [row_of("control", control_beats(model, arguments.seconds))]
    for name, call in calls(model).items():
        with Heartbeat() as heart:
            repeat(call, arguments.seconds)
        rows.append(row_of(name, heart.late, rows[0]))
    rows.append(row_of("control again", control_beats(model, arguments.seconds), rows[0]))
    report.print_rows(f"A thread that ticks every 2 ms: how late, in ms ({model.plan.threads} threads)", rows, COLUMNS)
    return rows


def control_beats(model, seconds):
    with busy(model.plan.threads), Heartbeat() as heart:
        time.sleep(seconds)
    return heart.late


def row_of(name, late, control=None):
    """Milliseconds; what is beyond the control in columns of its own."""
    late = sorted(late)
    row = {"call": name, "n": len(late), "median": 1e3 * statistics.median(late), "p99": 1e3 * percentile(late, 0.99),
           "worst": 1e3 * late[-1]}
    if control is not None:
        row |= {f"{key} excess": max(0.0, row[key] - control[key]) for key in ("p99", "worst")}
    return row


def percentile(ordered, share):
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# ---- a Qt loop ----

def qt_loop(model, arguments):
    try:
        from warp_embed.integrations.qt import QtCore, Worker
    except ImportError as error:
        print(f"\nNo Qt loop: {error}")
        return []
    application = QtCore.QCoreApplication.instance() or QtCore.QCoreApplication([])
    rows = []
    for name in ("control", "decode"):
        late, last, worker, session = [], [0.0], Worker(), model.session()
        timer = QtCore.QTimer(timerType=QtCore.Qt.TimerType.PreciseTimer)

        def tick(late=late, last=last):
            now = time.perf_counter()
            if last[0]:
                late.append(max(0.0, now - last[0] - TICK_S))
            last[0] = now
        timer.timeout.connect(tick)
        timer.start(round(1000 * TICK_S))
        QtCore.QTimer.singleShot(round(1000 * arguments.seconds), application.quit)
        with busy(model.plan.threads) if name == "control" else contextlib.nullcontext():
            if name == "decode":
                worker.run(endless, session)
            application.exec()
        worker.stop()
        worker.wait()
        timer.stop()
        session.close()
        rows.append(row_of(f"Qt, {name}", late, rows[0] if rows else None))
    report.print_rows("A Qt timer of 2 ms beside a full-speed decode: how late, in ms", rows, COLUMNS)
    return rows


def endless(session):
    """Tokens without end: what the context has room for, again and again."""
    session.prefill([1, 2, 3])
    while True:
        if session.position == session.context:
            session.rewind(3)
        yield session.step(Sampling(temperature=1.0, seed=1))


# ---- budgets and frames ----

def budgets(model, arguments):
    rows = []
    for budget in (BUDGET_S, BUDGET_S / 20):
        for name, steps in (("control", spins(budget)), ("step", endless_steps(model, budget))):
            over, end = [], time.perf_counter() + arguments.seconds
            while time.perf_counter() < end:
                begin = time.perf_counter()
                next(steps)
                over.append(max(0.0, time.perf_counter() - begin - budget))
            rows.append(row_of(f"{name}(budget_s={budget})", over, rows[-1] if name == "step" else None))
    report.print_rows("A step with a budget: by how much it is exceeded, in ms", rows, COLUMNS)
    return rows


def spins(budget):
    """The control of a budget: one thread that looks at the clock until it is used up."""
    while True:
        end = time.perf_counter() + budget
        while time.perf_counter() < end:
            pass
        yield


def endless_steps(model, budget):
    with model.session() as session:
        session.prefill([1, 2, 3])
        while True:
            if session.position == session.context:
                session.rewind(3)
            yield session.step(budget_s=budget)


def frames(model, arguments):
    """Two loops at 60 Hz: one lends the model 4 ms of each frame, the other as much to native threads."""
    def burn_together():
        list(pool.map(burn, [BUDGET_S] * model.plan.threads))
    rows = []
    with ThreadPoolExecutor(model.plan.threads) as pool, model.session() as session:
        session.prefill([1, 2, 3])
        for name, work in (("control", burn_together), ("model", lambda: lend(session, BUDGET_S))):
            lost, late = 0, []
            due = time.perf_counter() + FRAME_S
            for _ in range(int(arguments.seconds / FRAME_S)):
                draw_until = time.perf_counter() + DRAW_S
                while time.perf_counter() < draw_until:
                    pass
                work()
                now = time.perf_counter()
                late.append(max(0.0, now - due))
                lost += now > due
                due = max(due, now) + FRAME_S if now > due else due + FRAME_S
                time.sleep(max(0.0, due - FRAME_S - now))
            rows.append({**row_of(f"60 Hz, {name}", late, rows[0] if rows else None), "lost": lost})
    report.print_rows("A loop at 60 Hz: lost frames, and how late frames are, in ms", rows,
                      ["call", "n", "lost", *COLUMNS[2:]])
    return rows


def lend(session, budget):
    """As many tokens, or parts of one, as fit into the budget."""
    end = time.perf_counter() + budget
    while (left := end - time.perf_counter()) > 0:
        if session.position == session.context:
            session.rewind(3)
        session.step(budget_s=left)


COLUMNS = ["call", "n", "median", "p99", "worst", "p99 excess", "worst excess"]
PARTS = {"heartbeats": heartbeats, "qt": qt_loop, "budgets": budgets, "frames": frames, "overhead": overhead.measure}


def plot(document, axes):
    rows = [row for row in document["rows"] if "p99" in row]
    axes.barh([row["call"] for row in rows], [row["p99"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms late, p99")
