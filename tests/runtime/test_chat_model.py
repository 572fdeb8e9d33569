"""The chat over a real engine, on a model of gibberish: what the session read is the transcript, to the bit."""
import threading
from itertools import islice

import numpy as np
import pytest
from gibberish import write_checkpoint
from test_chat import transcript

from warp_embed import Chat, Model, Sampling

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
    form = chat._format
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
