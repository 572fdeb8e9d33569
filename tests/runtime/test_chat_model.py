"""The chat over a real engine, on a model of gibberish: what the session read is the transcript, to the bit."""
import asyncio
import threading
from itertools import islice

import numpy as np
import pytest
from gibberish import write_checkpoint
from scripted import transcript

from warp_embed import Chat, Model, Sampling, StateError
from warp_embed.runtime.core import SessionCore

HOT = Sampling(temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from warp_embed.convert import convert
    path = tmp_path_factory.mktemp("models") / "gibberish.waste"
    convert(write_checkpoint(tmp_path_factory.mktemp("checkpoint")), path)
    with Model.open(path, context=1024, threads=2) as model:
        yield model


def said(model, chat):
    """Ids of the transcript when every reply is what `chat.reply` and the messages say; for one reply only."""
    *before, (role, _) = [(m["role"], m["content"]) for m in chat.messages]
    assert role == "assistant"
    form = chat._said.form
    ids = transcript(model.tokenizer, *before) + form.open + [t.id for t in chat.reply]
    return ids if chat.reply[-1].id == form.stop else ids + form.turns["assistant"][1]


@pytest.mark.parametrize("sampling", [None, HOT])
def test_the_session_holds_the_transcript_to_the_bit(model, sampling):
    with model.chat(system="the") as chat, model.session() as fresh:
        text = "".join(chat.ask("Hello <|im_end|>", max_tokens=20, sampling=sampling))
        assert text == chat.messages[-1]["content"] and len(chat.reply) == 20 and chat.finish_reason == "length"
        assert chat.session.tokens == said(model, chat)
        assert np.array_equal(fresh.prefill(chat.session.tokens), chat.session.logits)


def test_a_dropped_reply_is_as_if_it_had_been_that_short(model):
    with model.chat() as dropped, model.chat() as short:
        reply = dropped.ask("Hello")
        list(islice(reply, 3))
        reply.close()
        list(short.ask("Hello", max_tokens=len(dropped.reply)))
        assert list(dropped.ask("the", max_tokens=5)) == list(short.ask("the", max_tokens=5))
        assert dropped.session.tokens == short.session.tokens
        assert np.array_equal(dropped.session.logits, short.session.logits)


def test_a_saved_chat_goes_on_as_if_it_had_not_been_saved(model, tmp_path):
    with model.chat() as chat:
        list(chat.ask("Hello", max_tokens=5))
        chat.session.save(tmp_path / "chat.state")
        with Chat.from_session(model.restore(tmp_path / "chat.state"), chat.messages) as again:
            assert (list(again.ask("the", max_tokens=9, sampling=HOT))
                    == list(chat.ask("the", max_tokens=9, sampling=HOT)))
            assert again.messages == chat.messages and again.session.tokens == chat.session.tokens


def test_a_cancel_between_two_pieces_counts(model):
    with model.chat() as chat:
        for calls, expected in ((1, 1), (3, 3)):
            pieces = []
            for piece in chat.ask("Hello", max_tokens=40):
                pieces.append(piece)
                if len(pieces) == calls:
                    chat.cancel()
            assert chat.finish_reason == "cancelled" and len(pieces) <= expected + 1    # and what was held back
        reply = chat.ask("Hello", max_tokens=40)
        chat.cancel()
        list(reply)
        assert chat.finish_reason == "cancelled"


@pytest.fixture
def evaluated(monkeypatch):
    """Tokens evaluated since the list was cleared, by all sessions."""
    counts = []
    advance = SessionCore._advance
    monkeypatch.setattr(SessionCore, "_advance", lambda self, state, ids, *rest, **more: (
        counts.append(len(ids)), advance(self, state, ids, *rest, **more))[1])
    return counts


def test_edits_and_retries_evaluate_only_what_changed(model, evaluated):
    with model.chat(system="the") as chat:
        for question in ("Hello", "the end", "123"):
            list(chat.ask(question, max_tokens=6))
        tokens, logits = chat.session.tokens, chat.session.logits
        evaluated.clear()
        assert "".join(chat.retry(max_tokens=6)) == chat.messages[-1]["content"]
        assert sum(evaluated) == 6 + 1 and chat.session.tokens == tokens        # the reply and its suffix
        assert np.array_equal(chat.session.logits, logits)
        evaluated.clear()
        list(chat.edit(3, "other", max_tokens=6))
        assert sum(evaluated) == chat.count_tokens("other") + 6 + 1
        evaluated.clear()
        list(chat.edit(1, "123", max_tokens=6))
        assert sum(evaluated) == chat.count_tokens("123") + 6 + 1
        with model.session() as fresh:
            assert np.array_equal(fresh.prefill(chat.session.tokens), chat.session.logits)


def test_retries_differ_and_can_be_repeated(model, tmp_path):
    # Nothing ends a reply early: two empty ones would be alike by chance.
    hot = Sampling(temperature=1.5, logit_bias=dict.fromkeys(model.tokenizer.special.values(), -1e9))
    with model.chat() as chat:
        answers = ["".join(chat.ask("Hello", max_tokens=12, sampling=hot))]
        chat.save(tmp_path / "chat.state")
        answers += ["".join(chat.retry(max_tokens=12, sampling=hot)) for _ in range(3)]
    assert len(set(answers)) > 1                # two may be alike by chance, four are not
    with Chat.restore(model, tmp_path / "chat.state") as chat:
        assert ["".join(chat.retry(max_tokens=12, sampling=hot)) for _ in range(3)] == answers[1:]


def test_a_stop_string_leaves_no_trace_in_the_session(model):
    with model.chat() as chat, model.session() as fresh:
        whole = "".join(chat.ask("Hello", max_tokens=20, sampling=HOT))
        stop = whole[len(whole) // 2:][:2]
        assert "".join(chat.retry(max_tokens=20, sampling=HOT, stop=stop)) == whole[:whole.index(stop)]
        assert chat.finish_reason == "stop"
        said = model.tokenizer.decode(chat.session.tokens[chat.count_tokens("Hello"):])
        assert said == chat.messages[-1]["content"] + "<|im_end|>"
        assert np.array_equal(fresh.prefill(chat.session.tokens), chat.session.logits)


def test_dropping_the_oldest_turns(model):
    with model.chat(system="the") as chat:
        for i in range(30):
            list(chat.ask(f"Hello {i} " * 5, max_tokens=40, overflow="drop_oldest"))
            assert chat.session.position <= 1024 and chat.finish_reason in ("length", "stop")
        assert 0 < chat.dropped < 29 and len(chat.messages) == 61
        with model.session() as fresh:
            assert np.array_equal(fresh.prefill(chat.session.tokens), chat.session.logits)


@pytest.mark.parametrize("questions", [1, 30])
def test_a_chat_is_saved_with_its_messages(model, tmp_path, evaluated, questions):
    with model.chat(system="the") as chat:
        for i in range(questions):
            list(chat.ask(f"Hello <|im_end|> \ud7ff{i} " * 4, max_tokens=40, overflow="drop_oldest"))
        chat.save(tmp_path / "chat.state")
        evaluated.clear()
        with Chat.restore(model, tmp_path / "chat.state") as again:
            assert not evaluated
            assert (again.messages, again.dropped, again.tokens_left) == (chat.messages, chat.dropped, chat.tokens_left)
            index = len(chat.messages) - 2
            assert list(again.edit(index, "the", max_tokens=9)) == list(chat.edit(index, "the", max_tokens=9))
            list(again.edit(1, "the", max_tokens=3)), list(chat.edit(1, "the", max_tokens=3))
            assert again.session.tokens == chat.session.tokens and len(again.messages) == 3
            assert np.array_equal(again.session.logits, chat.session.logits)


def test_a_chat_saved_in_the_middle_of_a_reply_or_of_a_full_context(model, tmp_path):
    with model.chat() as chat:
        next(chat.ask("Hello"))
        chat.save(tmp_path / "a.state")
        list(chat.ask("x " * 300, max_tokens=1000))
        assert chat.finish_reason == "context" and chat.session.position == 1024
        chat.save(tmp_path / "b.state")
        for name in "ab":
            with Chat.restore(model, tmp_path / f"{name}.state") as again:
                assert again.messages == chat.messages[:len(again.messages)]
                assert list(again.edit(0, "the", max_tokens=3))


def test_a_fork_goes_its_own_way(model):
    with model.chat() as chat:
        list(chat.ask("Hello", max_tokens=5))
        with chat.fork() as twin:
            assert list(twin.ask("the", max_tokens=5)) == list(chat.ask("the", max_tokens=5))
            assert twin.session.tokens == chat.session.tokens and twin.messages == chat.messages
            list(twin.edit(0, "123", max_tokens=5))
            assert len(twin.messages) == 2 and len(chat.messages) == 4
            assert list(chat.retry(max_tokens=3))


def test_a_note_that_is_none_of_a_chat_is_refused(model, tmp_path):
    with model.chat(system="the") as chat:
        list(chat.ask("Hello", max_tokens=5))
        good = chat._said.note(chat.session.position)
        for change in ({"messages": []}, {"messages": [{}] * 3}, {"sizes": [1]}, {"sizes": [-1, 1, 1]}, {"dropped": 9},
                       {"sizes": [1 << 40, 1, 1]}, {"locked": 4}, {"locked": True}, {"unread": [1 << 40]},
                       {"unread": "x"}, {"messages": good["messages"][1:]}, {"dropped": None}, {"attempt": "x"}):
            chat.session.save(tmp_path / "a.state", note={"warp_embed.chat": {**good, "attempt": 0, **change}})
            with pytest.raises(StateError) as error:
                Chat.restore(model, tmp_path / "a.state")
            assert error.value.field == "note", change
        gone = [{"role": role, "content": "\ud800"} for role in ("user", "assistant")]
        lone = {**good, "messages": [*good["messages"][:1], *gone, *good["messages"][1:]], "dropped": 1, "attempt": 0,
                "sizes": [*good["sizes"][:1], 0, 0, *good["sizes"][1:]]}
        chat.session.save(tmp_path / "a.state", note={"warp_embed.chat": lone})
        with pytest.raises(StateError, match="note"):
            Chat.restore(model, tmp_path / "a.state")
        for note in (None, {}, {"warp_embed.chat": 3}):
            chat.session.save(tmp_path / "a.state", note=note)
            with pytest.raises(StateError, match="not saved by Chat.save"):
                Chat.restore(model, tmp_path / "a.state")
        assert model.stats()["sessions"] == 1


def test_a_reply_can_be_cancelled_from_another_thread(model):
    with model.chat() as chat, model.session() as fresh:
        pieces = []
        for piece in chat.ask("Hello", max_tokens=900):
            pieces.append(piece)
            if len(pieces) == 3:
                stopper = threading.Thread(target=chat.cancel)
                stopper.start()
            if len(pieces) > 3:
                stopper.join()
        assert chat.finish_reason == "cancelled" and len(pieces) < 900
        chat.settle()
        assert chat.session.tokens == said(model, chat)
        assert list(chat.ask("the", max_tokens=3))
        assert np.array_equal(fresh.prefill(chat.session.tokens), chat.session.logits)


def test_a_chat_in_an_event_loop(model):
    async def talk(chat):
        return [piece async for piece in chat.aask("Hello", max_tokens=9, sampling=HOT)]

    async def stop(chat):
        task = asyncio.ensure_future(talk(chat))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    with model.chat() as chat, model.chat() as other:
        assert asyncio.run(talk(chat)) == list(other.ask("Hello", max_tokens=9, sampling=HOT))
        assert chat.session.tokens == other.session.tokens and chat.finish_reason == "length"
        asyncio.run(stop(chat))
        assert list(chat.ask("the", max_tokens=3))


def act(chat, rng, model, folder):
    """Do something at random; the chat to go on with."""
    options = {"max_tokens": int(rng.integers(1, 12)), "sampling": HOT if rng.random() < 0.5 else None,
               "overflow": "drop_oldest", "stop": "e" if rng.random() < 0.2 else ()}
    questions = [i for i, m in enumerate(chat.messages) if m["role"] == "user"]
    kinds = {"ask": 0.4, "edit": 0.15, "retry": 0.15, "drop": 0.1, "cancel": 0.1, "save": 0.05, "fork": 0.05}
    kind = rng.choice(list(kinds), p=list(kinds.values()))
    text = "Hello the end " * int(rng.integers(1, 4))
    if kind == "edit" and questions:
        list(chat.edit(int(rng.choice(questions)), text, **options))
    elif kind == "retry" and questions:
        list(chat.retry(**options))
    elif kind == "drop":
        next(chat.ask(text, **options), None)
    elif kind == "cancel":
        for _ in chat.ask(text, **options):
            chat.cancel()
    elif kind == "save" and chat.messages:
        chat.save(folder / "walk.state")
        chat.close()
        return Chat.restore(model, folder / "walk.state")
    elif kind == "fork" and questions:
        twin = chat.fork()
        chat.close()
        return twin
    else:
        list(chat.ask(text, **options))
    return chat


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_done_the_session_holds_the_transcript_that_is_told(model, tmp_path, seed):
    rng = np.random.default_rng(seed)
    tok, chat = model.tokenizer, model.chat(system="the" if seed % 2 else None)
    for step in range(60):
        chat = act(chat, rng, model, tmp_path)
        chat.settle()
        first = chat._said.first
        told = chat.messages[:first] + chat.messages[first + 2 * chat.dropped:]
        form = chat._said.form
        want = "".join(tok.decode(form.turns[m["role"]][0]) + m["content"] + tok.decode(form.turns[m["role"]][1])
                       for m in told)
        held = tok.decode(chat.session.tokens)
        assert held == want or (chat.tokens_left == 0 and want.startswith(held.rstrip("\ufffd"))), step
        assert chat.session.position == 1024 - chat.tokens_left
        if step % 20 == 19:
            with model.session() as fresh:
                assert np.array_equal(fresh.prefill(chat.session.tokens), chat.session.logits)
    assert chat.dropped or len(chat.messages) < 30
    chat.close()
