"""Every public method with every kind of bad argument, and in every wrong state: documented exceptions only.

The methods are read from the classes: one that is new fails here until it has a call below.
"""
import asyncio
import contextlib
import decimal
import inspect
import io
import itertools
import math
import threading
import warnings

import numpy as np
import pytest
from gibberish import write_checkpoint
from vocabulary import XTML_SPECIALS

import warp_embed
from warp_embed import Chat, MemoryPlan, Model, Sampling, Session, WarpError
from warp_embed.runtime.tokenizer import StopFilter, TextStream, Tokenizer

PROMPT = [7, 65, 300, 9]
BAD = [None, True, -1, 0, "24XB", 1 << 31, 1 << 70, -(1 << 70), 0.5, -0.5, math.nan, math.inf, -math.inf, "", "x",
       "\ud800", "\0", "x" * 5000, b"x", [], [1.5], ["a"], [None], [-1], [1 << 70], [[1]], [1] * 5000, {}, {"a": 1},
       {1: 2}, (), object(), lambda *a: 1 / 0, np.float32("nan"), np.array([1.0]), np.array([1]), np.array(3),
       np.zeros((0,)), np.True_, decimal.Decimal("nan"), {"role": 3}]
DOCUMENTED = (WarpError, TypeError, ValueError, IndexError, OSError, ImportError, MemoryError, ZeroDivisionError)
NO_CALLS = {"__init__", "from_session", "restore", "open"}      # see CALLS; constructors have their own lines

# What a right call looks like: keyword arguments by method. Everything that a method takes must be here.
CALLS = {
    Session: {
        "aprefill": {"tokens": [1], "all_logits": False, "on_progress": None},
        "agenerate": {"prompt": None, "max_tokens": 2}, "cancel": {}, "checkpoint": {}, "close": {}, "fork": {},
        "generate": {"prompt": None, "max_tokens": 2, "sampling": None, "stop": "x", "stop_ids": [5], "top_logprobs": 1,
                     "schema": None, "grammar": None},
        "poll": {"budget_s": 0.0}, "prefill": {"tokens": [1], "all_logits": False, "on_progress": None},
        "rewind": {"position": 1}, "save": {"target": io.BytesIO, "note": None}, "spill": {"folder": None},
        "step": {"sampling": None, "token": None, "budget_s": None, "top_logprobs": 0},
        "sync": {"tokens": [1], "on_progress": None},
    },
    Chat: {
        "aask": {"text": "a", "max_tokens": 2}, "aedit": {"index": 0, "text": "a", "max_tokens": 2},
        "aretry": {"max_tokens": 2}, "add": {"role": "user", "content": "a", "name": None},
        "add_tool_result": {"call": "f:1", "value": "x"},
        "ask": {"text": "a", "max_tokens": 2, "sampling": None, "stop": "x", "overflow": "refuse", "top_logprobs": 1,
                "schema": None, "grammar": None, "tools": None, "effort": None, "tool_choice": "auto",
                "response_format": None, "budget_s": None, "on_progress": None},
        "events": {"text": "a", "edit": None, "retry": False, "max_tokens": 2}, "cancel": {}, "close": {},
        "count_tokens": {"text": "a"},
        "edit": {"index": 0, "text": "a", "max_tokens": 2}, "fork": {}, "poll": {"budget_s": None},
        "retry": {"max_tokens": 2}, "save": {"target": io.BytesIO}, "settle": {},
    },
    Model: {
        "chat": {"system": "a"}, "close": {}, "memory": {}, "resize_cache": {"nbytes": 1 << 20},
        "restore": {"source": io.BytesIO}, "session": {}, "stats": {}, "trim": {},
    },
    Tokenizer: {
        "decode": {"ids": [1]}, "encode": {"text": "a"}, "encode_markup": {"text": "a"}, "token_bytes": {"token": 1},
    },
    TextStream: {"flush": {}, "push": {"token": 1}}, StopFilter: {"flush": {}, "push": {"text": "a"}},
}
PROPERTIES = {
    Session: {"busy_timeout_s", "context", "embedding", "logits", "position", "seed", "tokens"},
    Chat: {"dropped", "messages", "tokens_left"}, Model: {"has_text", "tokenizer"}, Tokenizer: set(),
    TextStream: {"pending"}, StopFilter: set(),
}
ANY_OPTIONS = {"agenerate", "aask", "aedit", "aretry", "edit", "retry", "events"}      # those of ask or generate


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    from warp_embed.convert import convert
    path = tmp_path_factory.mktemp("models") / "gibberish.waste"
    convert(write_checkpoint(tmp_path_factory.mktemp("checkpoint"), XTML_SPECIALS), path)
    return path


@pytest.fixture(scope="module")
def model(path):
    with Model.open(path, context=256, threads=2) as model:
        yield model


def public(cls):
    """The names of methods and of properties that a user sees."""
    names = {n: inspect.getattr_static(cls, n) for n in dir(cls) if not n.startswith("_")}
    return ({n for n, v in names.items() if callable(v) or isinstance(v, classmethod)} - NO_CALLS,
            {n for n, v in names.items() if isinstance(v, property)})


@pytest.mark.parametrize("cls", CALLS, ids=lambda cls: cls.__name__)
def test_no_method_is_forgotten(cls):
    methods, properties = public(cls)
    if cls is Model:
        methods |= {"restore"}
    assert methods == CALLS[cls].keys() and properties == PROPERTIES[cls]
    for name, arguments in CALLS[cls].items():
        signature = inspect.signature(getattr(cls, name)).parameters
        named = {n for n, p in signature.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)} - {"self"}
        assert named <= arguments.keys(), name


def fresh(cls, model):
    """An object that has seen something."""
    if cls is Model:
        return model
    if cls is Tokenizer:
        return model.tokenizer
    if cls in (TextStream, StopFilter):
        return TextStream(model.tokenizer) if cls is TextStream else StopFilter("stop")
    if cls is Session:
        session = model.session()
        session.prefill(PROMPT)
        return session
    chat = model.chat(system="the")
    chat.add("user", "Hello")
    chat.add("assistant", "", tool_calls=[{"id": "f:1", "name": "f"}])
    return chat


def use(result):
    """Run what a call gave: a few items of an iterator, a coroutine to its end."""
    if inspect.isasyncgen(result):
        async def some():
            async for _ in result:
                break
            await result.aclose()
        asyncio.run(some())
    elif inspect.iscoroutine(result):
        asyncio.run(result)
    elif inspect.isgenerator(result):
        list(itertools.islice(result, 3))
        result.close()
    elif isinstance(result, Session | Chat):
        result.close()


def arguments_of(good):
    return {name: value() if value is io.BytesIO else value for name, value in good.items()}


def call(thing, name, arguments):
    """Whether it went well; anything that is not documented comes out."""
    try:
        use(getattr(thing, name)(**arguments))
        return True
    except DOCUMENTED:
        return False


def answers(session):
    """What a session says after PROMPT: the same as ever."""
    session.cancel()                        # a token that is pending
    session.sync(PROMPT)
    return [session.step(Sampling(temperature=1.0, seed=3)).id for _ in range(6)]


@pytest.fixture(scope="module")
def want(model):
    with model.session() as session:
        return answers(session)


CASES = [pytest.param(cls, name, good, id=f"{cls.__name__}.{name}") for cls, methods in CALLS.items()
         for name, good in methods.items() if (cls, name) != (Model, "close")]      # the others need the model


@pytest.mark.parametrize("cls, name, good", CASES)
def test_bad_arguments_raise_what_is_documented_and_spoil_nothing(model, want, cls, name, good, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)             # some bad paths are good ones
    options = good | (CALLS[Chat]["ask"] if name in ANY_OPTIONS and cls is Chat else {})
    for field in options:
        thing = fresh(cls, model)
        for bad in BAD:
            call(thing, name, {**arguments_of(good), field: bad})
            if isinstance(thing, Session) and thing._turn.closed:
                thing = fresh(cls, model)
        if isinstance(thing, Session):
            assert answers(thing) == want, (name, field)
        elif isinstance(thing, Chat):
            assert list(thing.edit(1, "Hello", max_tokens=3)) is not None and thing.finish_reason is not None
        if thing is not model and hasattr(thing, "close"):
            thing.close()
    with pytest.raises(TypeError):
        use(getattr(fresh(cls, model), name)(nonsense=1))
    with model.session() as session:
        assert answers(session) == want


@pytest.mark.parametrize("cls", [Session, Chat])
def test_in_a_wrong_state_every_method_raises_what_is_documented(path, want, cls):
    with Model.open(path, context=256, threads=1) as model:
        for state in ("empty", "closed", "busy", "full"):
            for name, good in CALLS[cls].items():
                empty = model.session if cls is Session else model.chat
                thing = empty() if state == "empty" else fresh(cls, model)
                session = thing if cls is Session else thing.session
                if state == "full":
                    session.sync([1] * 256)
                if state == "closed":
                    thing.close()
                with holding(session) if state == "busy" else contextlib.nullcontext():
                    fine = call(thing, name, arguments_of(good))
                    for attribute in PROPERTIES[cls]:
                        try:
                            getattr(thing, attribute)
                        except DOCUMENTED:
                            pass
                if state == "closed" and cls is Session and name not in ("cancel", "close"):
                    assert not fine, (state, name)
                if state != "closed" and name != "close":
                    assert answers(session) == want, (state, name)
                thing.close()
        assert model.stats()["sessions"] == 0
        chat = fresh(Chat, model)
    for thing in (chat, chat.session, model):
        for name, good in CALLS[type(thing)].items():
            call(thing, name, arguments_of(good))


class holding:
    """Another thread uses the session meanwhile."""

    def __init__(self, session):
        self.session, self.inside, self.leave = session, threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.hold)

    def hold(self):
        with self.session._turn:
            self.inside.set()
            self.leave.wait(0.5)            # close() waits for it

    def __enter__(self):
        self.thread.start()
        self.inside.wait(30)

    def __exit__(self, *exc):
        self.leave.set()
        self.thread.join()


OPENING = {"memory": "auto", "context": 64, "threads": 1, "kv": "f16", "verify": False, "on_progress": None}


@pytest.mark.parametrize("field", [*OPENING, "name"])
def test_a_model_opened_badly(path, want, field):
    signature = inspect.signature(Model.open).parameters.keys()
    for bad in BAD:
        arguments = {**{k: v for k, v in OPENING.items() if k in signature}, "name": path, field: bad}
        try:
            with Model.open(**arguments) as model, model.session() as session:
                assert answers(session) == want or model.plan.context < 10
        except DOCUMENTED:
            pass
        planned = {k: v for k, v in arguments.items() if k in ("memory", "context", "threads", "kv")}
        try:
            assert isinstance(warp_embed.plan(arguments["name"], **planned), MemoryPlan)
        except DOCUMENTED:
            pass


@pytest.mark.parametrize("field", inspect.signature(Sampling).parameters)
def test_a_sampling_made_badly(model, want, field):
    for bad in BAD:
        try:
            sampling = Sampling(**{"temperature": 1.0, field: bad})
            with model.session() as session:
                session.prefill(PROMPT)
                for _ in range(3):
                    session.step(sampling)
        except DOCUMENTED:
            pass
    with model.session() as session:
        assert answers(session) == want


NUMBERS = {                             # every number that a program hands over
    **{f"Sampling({name})": lambda s, v, name=name: Sampling(**{name: v})
       for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")},
    "an id in logit_bias": lambda s, v: Sampling(logit_bias={"1": 1.0} if isinstance(v, list) else {v.tobytes(): 1.0}),
    "a logit_bias": lambda s, v: Sampling(logit_bias={1: v}),
    "step(budget_s)": lambda s, v: s.step(budget_s=v), "poll(budget_s)": lambda s, v: s.poll(v),
    "step(token)": lambda s, v: s.step(token=v), "top_logprobs": lambda s, v: s.step(top_logprobs=v),
    "a token": lambda s, v: s.prefill([v]), "max_tokens": lambda s, v: s.generate(max_tokens=v),
    "generate(top_logprobs)": lambda s, v: s.generate(top_logprobs=v),
    "stop_ids": lambda s, v: s.generate(stop_ids=[v]),
    "rewind": lambda s, v: s.rewind(v), "busy_timeout_s": lambda s, v: setattr(s, "busy_timeout_s", v),
    "ask(max_tokens)": lambda s, v: s.model.chat().ask("a", max_tokens=v),
    "ask(budget_s)": lambda s, v: s.model.chat().ask("a", budget_s=v), "Chat.poll": lambda s, v: s.model.chat().poll(v),
    "edit(index)": lambda s, v: fresh(Chat, s.model).edit(v, "a"), "resize_cache": lambda s, v: s.model.resize_cache(v),
    "token_bytes": lambda s, v: s.model.tokenizer.token_bytes(v), "decode": lambda s, v: s.model.tokenizer.decode([v]),
    **{f"plan({name})": lambda s, v, name=name: warp_embed.plan(s.model.path, **{name: v})
       for name in ("context", "threads", "memory", "experts_per_token")},
    "a processor": lambda s, v: Model.open(s.model.path, threads=[v]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_an_array_is_no_number(model, want, name):
    with warnings.catch_warnings(), model.session() as session:
        warnings.simplefilter("error")
        session.prefill(PROMPT)
        for bad in (np.array([1]), np.array([1.0]), [1]):
            with pytest.raises((TypeError, ValueError)):
                NUMBERS[name](session, bad)
        assert answers(session) == want


def test_chats_made_badly(model, want):
    for bad in BAD:
        for make in (lambda b: Chat(model, system=b), lambda b: Chat(model, template=b),
                     lambda b: Chat.restore(model, b), lambda b: Chat.from_session(model.session(), b),
                     lambda b: Chat.from_session(model.session(), [b])):
            try:
                make(bad).close()
            except DOCUMENTED:
                pass
    with model.session() as session:
        assert answers(session) == want
