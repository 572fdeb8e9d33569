"""Sessions in an event loop: the same tokens in the same order, and no call outlives its task."""
import asyncio
import contextlib
import gc
import threading
import time

import numpy as np
import pytest

import warp_embed
from warp_embed import Model, Sampling

HOT = Sampling(temperature=1.0, seed=3)


def run(coroutine):
    """Run it to its end; afterwards nothing may be left: no thread, no warning, no task."""
    before = set(threading.enumerate())
    complaints = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        result = await asyncio.wait_for(coroutine, 60)
        await asyncio.sleep(0)
        return result

    try:
        return asyncio.run(main())
    finally:
        gc.collect()
        assert not complaints
        assert set(threading.enumerate()) <= before


@pytest.fixture(scope="module")
def model(tiny):
    with Model.open(tiny, context=4000, threads=2) as model:
        yield model


def test_generate_in_a_loop_gives_the_same_tokens(model, prompt):
    async def generate():
        return [token async for token in session.agenerate(prompt, max_tokens=30, sampling=HOT, top_logprobs=2)]

    with model.session() as session:
        tokens = run(generate())
        assert session.position == len(prompt) + 30
    with model.session() as session:
        want = list(session.generate(prompt, max_tokens=30, sampling=HOT, top_logprobs=2))
    assert [(t.id, t.logprob, t.top_logprobs, t.finish_reason) for t in tokens] == [
        (t.id, t.logprob, t.top_logprobs, t.finish_reason) for t in want]


def test_prefill_in_a_loop(model, prompt):
    with model.session() as one, model.session() as other:
        assert np.array_equal(run(one.aprefill(prompt, all_logits=True)), other.prefill(prompt, all_logits=True))
        with pytest.raises(ValueError):
            run(one.aprefill([]))
        with pytest.raises(warp_embed.ContextFull):
            run(one.aprefill([1] * 4000))
        assert one.tokens == other.tokens


def test_the_loop_turns_while_the_model_works(model):
    async def both():
        ticks = 0
        reading = asyncio.ensure_future(session.aprefill([1, 2, 3, 4] * 500))
        while not reading.done():
            ticks += 1
            await asyncio.sleep(0.001)
        await reading
        return ticks

    with model.session() as session:
        assert run(both()) > 3


def test_a_cancelled_prefill_is_over_when_the_task_is(model, prompt):
    async def cancel_after(seconds):
        task = asyncio.ensure_future(session.aprefill([1, 2, 3, 4] * 900))
        await asyncio.sleep(seconds)
        task.cancel()
        asked = time.perf_counter()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        session.step(token=7)                           # free at once, in this very thread
        return time.perf_counter() - asked

    stopped = 0
    for seconds in (0, 0.0001, 0.001, 0.01, 0.1):       # a fast machine is through before the last
        with model.session() as session, model.session() as fresh:
            assert run(cancel_after(seconds)) < 1.0
            stopped += session.position < 3600
            fresh.prefill(session.tokens)
            assert np.array_equal(session.logits, fresh.logits)
    assert stopped >= 2


def test_a_cancelled_generation_is_over_when_the_task_is(model, prompt):
    async def consume(tokens):
        async for token in session.agenerate(prompt, sampling=HOT):
            tokens.append(token.id)

    async def cancel_at(n):
        tokens = []
        task = asyncio.ensure_future(consume(tokens))
        await asyncio.sleep(0)
        while len(tokens) < n and not task.done():      # the next one is being evaluated then
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert session.tokens[len(prompt):len(prompt) + len(tokens)] == tokens
        assert len(session.tokens) <= len(prompt) + len(tokens) + 1
        session.step(token=7)

    for n in (0, 1, 2, 20):
        with model.session() as session:
            run(cancel_at(n))


@pytest.mark.parametrize("work", ["aprefill", "agenerate"])
def test_one_cancel_is_enough_even_before_the_call_begins(model, monkeypatch, work):
    began, asked, cancels = threading.Event(), threading.Event(), []
    begin, cancel = warp_embed.Session._begin, warp_embed.Session.cancel

    def late(session):                                  # an earlier cancel would be forgotten here
        began.set()
        assert asked.wait(30)
        return begin(session)

    def counted(session):
        cancels.append(session)
        cancel(session)
        asked.set()

    async def cancelled():
        call = getattr(session, work)([1, 2, 3, 4] * 900)
        task = asyncio.ensure_future(call if work == "aprefill" else anext(call))
        while not began.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(cancels) == 1 and session.position == 0

    with model.session() as session:
        monkeypatch.setattr(warp_embed.Session, "_begin", late)
        monkeypatch.setattr(warp_embed.Session, "cancel", counted)
        run(cancelled())
        session.step(token=7)                           # what comes later is not stopped
        assert session.position == 1


def test_a_loop_that_is_left_leaves_the_session_at_its_last_token(model, prompt):
    async def some():
        tokens = []
        async for token in session.agenerate(prompt, sampling=HOT):
            tokens.append(token.id)
            if len(tokens) == 5:
                break
        assert session.tokens == [*prompt, *tokens]
        async for token in session.agenerate(sampling=HOT, max_tokens=3):
            tokens.append(token.id)
        stream = session.agenerate(sampling=HOT)
        tokens.append((await stream.__anext__()).id)
        await stream.aclose()
        return tokens

    with model.session() as session:
        tokens = run(some())
        assert session.tokens == [*prompt, *tokens]
        session.rewind(len(prompt))
        assert [t.id for t in session.generate(max_tokens=9, sampling=HOT)] == tokens


def test_a_loop_that_ends_in_the_middle_of_a_generation(model, prompt):
    async def leave_it():
        asyncio.ensure_future(forever())
        await asyncio.sleep(0.05)                       # asyncio.run cancels what is left

    async def forever():
        async for _ in session.agenerate(prompt):
            pass

    with model.session() as session:
        run(leave_it())
        session.step(token=7)


def test_a_timeout_ends_a_generation(model, prompt):
    async def timed():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(collect(), 0.05)

    async def collect():
        return [token async for token in session.agenerate([1, 2, 3] * 600)]

    with model.session() as session:
        run(timed())
        session.step(token=7)


def test_errors_arrive_where_they_belong(model, prompt):
    async def bad(**options):
        return [token async for token in session.agenerate(prompt, **options)]

    with model.session() as session:
        for options, error in (({"max_tokens": 0}, ValueError), ({"stop": [""]}, ValueError),
                               ({"nonsense": 1}, TypeError)):
            with pytest.raises(error):
                run(bad(**options))
        assert session.position == 0
        session.close()
        with pytest.raises(warp_embed.SessionClosed):
            run(bad())


def test_many_sessions_in_one_loop(model, prompt):
    async def all_of_them(sessions):
        async def one(session, seed):
            sampling = Sampling(temperature=1.0, seed=seed)
            return [token.id async for token in session.agenerate(prompt, max_tokens=10, sampling=sampling)]
        return await asyncio.gather(*(one(session, seed) for seed, session in enumerate(sessions)))

    sessions = [model.session() for _ in range(6)]
    answers = run(all_of_them(sessions))
    for seed, (session, answer) in enumerate(zip(sessions, answers, strict=True)):
        session.rewind(len(prompt))
        assert [t.id for t in session.generate(max_tokens=10, sampling=Sampling(temperature=1.0, seed=seed))] == answer
        session.close()
