"""A session is exact and keeps its promises: the same bits on every path, and nothing half-done after a failure."""
import io
import math
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import warp_embed
from warp_embed import Model, Sampling

RECORD_HEADER = 48


def continuation(session, n=12):
    """n greedy ids and the logits behind them."""
    return [session.step().id for _ in range(n)], session.logits


def same(one, other):
    return one[0] == other[0] and np.array_equal(one[1], other[1])


@pytest.fixture
def want(model, prompt):
    """What a session that was never disturbed answers to the prompt."""
    with model.session() as session:
        session.prefill(prompt)
        return continuation(session)


# ------------------------------------------------------------- the same bits ----

@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("memory", ["floor", "auto"])
def test_threads_and_cache_size_change_nothing(tiny, prompt, want, threads, memory):
    floor = warp_embed.plan(tiny, context=160).floor_bytes
    with Model.open(tiny, context=160, threads=threads, memory=floor if memory == "floor" else "auto") as model:
        assert model.memory()["total"] <= (floor if memory == "floor" else model.plan.limit_bytes)
        with model.session() as session:
            session.prefill(prompt)
            assert same(continuation(session), want)
        stats = model.stats()
        assert (stats["evictions"] > 0) == (memory == "floor")


def test_the_floor_is_enough_to_the_last_position(tiny, prompt):
    floor = warp_embed.plan(tiny, context=80).floor_bytes
    with Model.open(tiny, context=80, memory=floor, threads=8) as model, model.session() as session:
        session.prefill(prompt)
        while session.position < 80:
            session.step()
        file = io.BytesIO()
        session.save(file)
        with pytest.raises(warp_embed.ContextFull):
            session.step()
        assert session.position == 80
    with pytest.raises(warp_embed.BudgetError) as error:
        Model.open(tiny, context=80, memory=floor - 1)
    assert error.value.needed_bytes == floor and error.value.budget_bytes == floor - 1


def test_sessions_of_one_model_do_not_meet(model, prompt, want):
    answers = [None] * 4

    def run(i):
        with model.session() as session:
            session.prefill(prompt)
            answers[i] = continuation(session)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(answers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(answer, want) for answer in answers)


@pytest.mark.parametrize("kv", ["f32", "f16", "q8"])
def test_every_kv_gives_the_same_bits_for_every_cut(tiny, prompt, kv):
    with Model.open(tiny, context=160, kv=kv) as model:
        with model.session() as session:
            logits = session.prefill(prompt)
        for cut in (1, 33, 64, 69):
            with model.session() as session:
                session.prefill(prompt[:cut])
                assert np.array_equal(session.prefill(prompt[cut:]), logits)


# ------------------------------------------------------- pausing and cancelling ----

def test_a_budget_pauses_between_layers_and_resumes(model, prompt, want):
    with model.session() as session:
        session.prefill(prompt)
        ids, pauses = [], 0
        while len(ids) < len(want[0]):
            token = session.step(budget_s=0)
            if token is None:
                pauses += 1
                assert session.position == len(prompt) + len(ids)
                with pytest.raises(warp_embed.StateError):
                    session.prefill([1])
                with pytest.raises(warp_embed.StateError):
                    session.step(token=(session._pending.id + 1) % 256)
            else:
                ids.append(token.id)
        assert same((ids, session.logits), want)
        config = model.config               # between layers, and between the experts of a layer
        assert pauses == len(ids) * (config.n_layers - 1 + len(config.moe_layers) * (config.top_k - 1))


def test_another_session_may_run_inside_a_pause(model, prompt, want):
    with model.session() as one, model.session() as other:
        one.prefill(prompt)
        other.prefill(prompt[:9])
        ids = []
        while len(ids) < len(want[0]):
            token = one.step(budget_s=0)
            if token is None:
                other.step()
            else:
                ids.append(token.id)
        assert same((ids, one.logits), want)


def test_poll_finishes_what_step_began_and_begins_nothing(model, prompt, want):
    with model.session() as session:
        session.prefill(prompt)
        assert session.poll() is None and session.poll(1.0) is None and session.position == len(prompt)
        ids = []
        while len(ids) < len(want[0]):
            token = session.step(budget_s=0)
            while token is None:
                token = session.poll()
            ids.append(token.id)
        assert same((ids, session.logits), want)


def test_a_call_may_wait_for_another_thread(model, prompt):
    with model.session() as session:
        session.busy_timeout_s = 30
        entered, seen = threading.Event(), []

        def other():
            entered.wait(30)
            seen.append(session.step(token=1).id)

        thread = threading.Thread(target=other)
        thread.start()
        session.prefill(prompt, on_progress=lambda done, total: entered.set())
        thread.join()
        assert seen == [1] and session.position == len(prompt) + 1


def test_cancel_drops_a_pending_token(model, prompt, want):
    with model.session() as session:
        session.prefill(prompt)
        assert session.step(token=7, budget_s=0) is None
        session.cancel()
        assert same(continuation(session), want)


def test_cancel_stops_a_prompt_at_its_last_piece(tiny, prompt, want):
    floor = warp_embed.plan(tiny, context=160).floor_bytes
    with Model.open(tiny, context=160, memory=floor) as model, model.session() as session:
        seen = []

        def stop_after_two(done, total):
            seen.append(done)
            if len(seen) == 2:
                canceller = threading.Thread(target=session.cancel)
                canceller.start()
                canceller.join()

        with pytest.raises(warp_embed.Cancelled):
            session.prefill(prompt, on_progress=stop_after_two)
        assert session.position == seen[-1] == 2 * model.plan.chunk < len(prompt)
        assert session.tokens == prompt[:seen[-1]].tolist()
        session.prefill(prompt[session.position:])
        assert same(continuation(session), want)


def test_cancel_ends_a_generation(model, prompt):
    with model.session() as session:
        tokens = []
        for token in session.generate(prompt, max_tokens=50):
            tokens.append(token)
            if len(tokens) == 5:
                session.cancel()
        assert [t.finish_reason for t in tokens] == [None] * 5 + ["cancelled"]
        assert session.position == len(prompt) + 5


def test_interrupt_reaches_the_caller(tiny):
    """Ctrl-C inside a call is a KeyboardInterrupt, and the session goes on."""
    program = f"""
import os, signal, threading
from warp_embed import Model
with Model.open({str(tiny)!r}, context=8192, threads=1) as model, model.session() as session:
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            session.prefill([1, 2, 3, 4] * 500)
            session.rewind(0)
    except KeyboardInterrupt:
        position = session.position
        session.prefill([5])
        print("went on", session.position == position + 1)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (out.stdout, out.stderr) == ("went on True\n", "")


# ------------------------------------------------------------------- failures ----

BAD_CALLS = [
    (lambda s: s.prefill([]), ValueError), (lambda s: s.prefill([True]), TypeError),
    (lambda s: s.prefill([1.5]), TypeError), (lambda s: s.prefill(np.array([1.0])), TypeError),
    (lambda s: s.prefill("text"), TypeError), (lambda s: s.prefill([-1]), ValueError),
    (lambda s: s.prefill([256]), ValueError), (lambda s: s.prefill([1 << 70]), ValueError),
    (lambda s: s.prefill([[1, 2]]), ValueError), (lambda s: s.prefill(None), TypeError),
    (lambda s: s.prefill([1] * 161), warp_embed.ContextFull), (lambda s: s.step(token=-1), ValueError),
    (lambda s: s.step(token=256), ValueError), (lambda s: s.step(token=True), TypeError),
    (lambda s: s.step(token=1.0), TypeError), (lambda s: s.step(Sampling(), token=1), TypeError),
    (lambda s: s.step(budget_s=-1), ValueError), (lambda s: s.step(budget_s=math.nan), ValueError),
    (lambda s: s.generate(max_tokens=0), ValueError), (lambda s: s.generate(stop=[""]), ValueError),
    (lambda s: s.generate("text"), warp_embed.FormatError), (lambda s: s.save(io.BytesIO()), warp_embed.StateError),
    (lambda s: s.step(), warp_embed.StateError),
]


def test_bad_calls_raise_what_is_documented_and_change_nothing(model, prompt, want):
    with model.session() as session:
        assert session.logits is None and session.position == 0
        for call, error in BAD_CALLS:
            with pytest.raises(error):
                call(session)
            assert session.position == 0
        session.prefill(prompt)
        assert same(continuation(session), want)


def test_a_session_belongs_to_one_caller_at_a_time(model, prompt):
    with model.session() as session:
        seen = []

        def again(done, total):
            with pytest.raises(warp_embed.SessionBusy):
                session.step()
            seen.append(done)

        session.prefill(prompt, on_progress=again)
        assert seen


def test_closed_means_closed(tiny, prompt):
    model = Model.open(tiny, context=160)
    session, other = model.session(), model.session()
    session.close()
    session.close()
    with pytest.raises(warp_embed.SessionClosed):
        session.step(token=1)
    other.prefill(prompt)
    model.close()
    model.close()
    for call in (lambda: other.step(), lambda: other.logits, lambda: model.session(), lambda: model.stats()):
        with pytest.raises(warp_embed.SessionClosed):
            call()


def test_closing_from_a_callback_does_not_hang(model, prompt):
    session = model.session()
    with pytest.raises(warp_embed.SessionClosed):
        session.prefill(prompt, on_progress=lambda done, total: session.close())
    with pytest.raises(warp_embed.SessionClosed):
        session.step()


def test_a_damaged_record_is_named_and_nothing_is_committed(tiny, prompt, want, tmp_path):
    import shutil
    copy = tmp_path / "copy.waste"
    shutil.copytree(tiny, copy)
    floor = warp_embed.plan(copy, context=160).floor_bytes
    with Model.open(copy, context=160, memory=floor) as model, model.session() as session:
        session.prefill(prompt)
        bank = copy / model._manifest.banks[3].file
        sound = bank.read_bytes()
        record = len(sound) // model.config.n_experts
        damaged = bytearray(sound)
        for expert in range(model.config.n_experts):
            damaged[expert * record] ^= 1
        bank.write_bytes(damaged)
        with pytest.raises(warp_embed.RecordError) as error:
            for _ in range(50):                     # until a token needs an expert that is not in the cache
                session.step()
        assert error.value.layer == 3 and 0 <= error.value.expert < 8
        assert error.value.offset == error.value.expert * record
        position = session.position
        bank.write_bytes(sound)
        assert session.position == position == len(session.tokens)
        tail = continuation(session, len(want[0]))
    with Model.open(tiny, context=160) as model, model.session() as session:
        session.prefill(prompt)
        while session.position < position:
            session.step()
        assert same(continuation(session, len(want[0])), tail)


def test_logits_that_are_not_finite_are_noticed(tiny, prompt, tmp_path):
    import shutil
    copy = tmp_path / "copy.waste"
    shutil.copytree(tiny, copy)
    with Model.open(copy) as model:
        entry = model._manifest.trunk["model.norm.weight"]
    with open(copy / "trunk.bin", "r+b") as file:
        file.seek(entry.offset)
        file.write(np.full(64, 3e38, "<f4").tobytes())          # NaN itself would be refused at open
    with Model.open(copy, context=160) as model, model.session() as session:
        with pytest.raises(warp_embed.NumericError):
            session.prefill(prompt)
        assert session.position == 0


def test_further_sessions_take_from_the_cache_until_it_is_at_its_minimum(tiny, prompt, want):
    plan = warp_embed.plan(tiny, context=160)
    room = plan.floor_bytes + plan.state_bytes
    with Model.open(tiny, context=160, memory=room, threads=2) as model:
        with model.session() as one:
            one.prefill(prompt)
            others = []
            with pytest.raises(warp_embed.BudgetError) as error:
                for _ in range(20):
                    others.append(model.session())
            assert error.value.needed_bytes > error.value.budget_bytes
            assert model.memory()["total"] <= room
            assert same(continuation(one), want)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_is_refused_and_the_parent_goes_on(tiny):
    program = f"""
import os, sys
import warp_embed
model = warp_embed.Model.open({str(tiny)!r}, threads=2)
session = model.session()
before = session.prefill([1, 2, 3])
child = os.fork()
if child == 0:
    try:
        session.step()
    except warp_embed.ForkedError:
        session.close()
        model.close()
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
session.step()
print("parent", session.position)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == "parent 4", out.stderr


def test_many_models_leave_nothing_behind(tiny, prompt):
    import psutil
    process = psutil.Process()

    def round_trip():
        with Model.open(tiny, context=160, threads=2) as model, model.session() as session:
            session.prefill(prompt)

    for _ in range(3):
        round_trip()
    threads, files = process.num_threads(), process.num_fds() if os.name == "posix" else process.num_handles()
    rss = process.memory_info().rss
    for _ in range(30):
        round_trip()
    assert process.num_threads() == threads
    assert (process.num_fds() if os.name == "posix" else process.num_handles()) == files
    assert process.memory_info().rss - rss < 4 << 20
