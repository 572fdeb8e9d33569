"""Chats in small portions, in forms, and saved, over a real engine: the same tokens as in one go."""
import asyncio
import json
import time

import numpy as np
import pytest
from gibberish import write_checkpoint
from vocabulary import SPECIALS, XTML_SPECIALS

from warp_embed import Chat, Model, Reasoning, Sampling

HOT = Sampling(temperature=1.0, seed=5)
SCHEMA = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"],
          "additionalProperties": False}
TOOLS = [{"name": "search", "parameters": {"type": "object"}}]


@pytest.fixture(scope="module", params=["kimi-linear", "xtml"])
def model(request, tmp_path_factory):
    from warp_embed.convert import convert
    path = tmp_path_factory.mktemp("models") / "gibberish.waste"
    specials = XTML_SPECIALS if request.param == "xtml" else SPECIALS
    convert(write_checkpoint(tmp_path_factory.mktemp("checkpoint"), specials), path)
    with Model.open(path, context=1500, threads=2) as model:
        yield model


def polled(chat, budget_s=None):
    """All that poll gives, and how often it gave nothing."""
    pieces = []
    while (piece := chat.poll(budget_s)) is not None:
        pieces.append(piece)
    return "".join(pieces), pieces.count("")


@pytest.mark.parametrize("budget_s", [0, 1e-4, 0.002, 10])
def test_a_reply_in_small_portions_is_the_same(model, budget_s):
    with model.chat(system="the") as chat, model.chat(system="the") as other:
        for question in ("Hello <|im_end|>", "the end"):
            want = "".join(other.ask(question, max_tokens=20, sampling=HOT))
            chat.ask(question, max_tokens=20, sampling=HOT, budget_s=budget_s)
            text, nothing = polled(chat)
            assert text == want and chat.finish_reason == other.finish_reason and chat.messages == other.messages
            assert [t.id for t in chat.reply] == [t.id for t in other.reply]
            assert nothing > 60 or budget_s, "a budget of nothing pauses in every layer"
        assert chat.session.tokens == other.session.tokens
        assert np.array_equal(chat.session.logits, other.session.logits)
        chat.ask("Hello", max_tokens=9)                 # without a budget there is nothing to poll
        assert chat.poll() is None
        list(chat.retry(max_tokens=9)), list(other.retry(max_tokens=9))
        assert chat.session.tokens == other.session.tokens


def test_edits_and_retries_in_small_portions(model):
    with model.chat() as chat, model.chat() as other:
        for question in ("Hello", "the end", "123"):
            list(chat.ask(question, max_tokens=6)), list(other.ask(question, max_tokens=6))
        for act in (lambda c, **o: c.retry(max_tokens=5, **o), lambda c, **o: c.edit(2, "what", max_tokens=5, **o)):
            assert "".join(act(chat, budget_s=0)) == "".join(act(other))
            assert chat.session.tokens == other.session.tokens
            assert np.array_equal(chat.session.logits, other.session.logits)


def test_a_portion_takes_no_longer_than_its_budget_says(model):
    with model.chat() as chat:
        chat.ask("Hello " * 40, max_tokens=40, budget_s=0.0)
        took = []
        while True:
            start = time.perf_counter()
            if chat.poll() is None:
                break
            took.append(time.perf_counter() - start)
        whole = time.perf_counter()
        list(chat.retry(max_tokens=40))
        assert np.median(took) < 0.2 * (time.perf_counter() - whole)


def test_a_reply_in_portions_can_be_cancelled_and_left_at_any_moment(model):
    with model.chat() as chat, model.session() as fresh:
        for polls in (0, 1, 7, 40, 90):
            chat.ask("Hello the end", max_tokens=20, budget_s=0)
            for _ in range(polls):
                chat.poll()
            chat.cancel()
            polled(chat)
            assert chat.finish_reason == "cancelled"
            chat.ask("Hello the end", max_tokens=20, budget_s=0)
            for _ in range(polls):
                chat.poll()
            list(chat.ask("other", max_tokens=3))       # another question in its place
            assert chat.poll() is None and chat.messages[-2]["content"] == "other"
            fresh.sync(chat.session.tokens)
            assert np.array_equal(fresh.logits, chat.session.logits)
        for wrong in (-1, float("nan")):
            with pytest.raises(ValueError, match="budget_s"):
                chat.poll(wrong)
            with pytest.raises(ValueError, match="budget_s"):
                chat.ask("Hello", budget_s=wrong)


@pytest.mark.parametrize("budget_s", [None, 0.0])
def test_progress_of_a_long_question(model, budget_s):
    with model.chat(system="the") as chat:
        list(chat.ask("Hello", max_tokens=3))
        seen, old = [], chat.session.position
        list(chat.ask("x" * 900, max_tokens=3, budget_s=budget_s, on_progress=lambda *numbers: seen.append(numbers)))
        totals = {total for _, total in seen}
        assert totals == {chat.count_tokens("x" * 900)} and old > 0
        done = [n for n, _ in seen]
        assert done == sorted(done) and 0 <= done[0] and done[-1] <= totals.pop() and len(done) > 1
        list(chat.retry(max_tokens=3, on_progress=lambda *numbers: seen.append(None)))
        assert None not in seen, "nothing had to be read"
        with pytest.raises(ZeroDivisionError):
            list(chat.ask("Hello", on_progress=lambda *numbers: 1 / 0, max_tokens=3))
        assert len(chat.messages) == 5
        list(chat.ask("Hello", max_tokens=3))


def test_edits_and_retries_in_an_event_loop(model):
    async def talk(chat):
        text = [piece async for piece in chat.aask("Hello", max_tokens=5, sampling=HOT)]
        text += [piece async for piece in chat.aretry(max_tokens=5)]
        return text + [piece async for piece in chat.aedit(0, "the", max_tokens=5)]

    with model.chat() as chat, model.chat() as other:
        want = [*other.ask("Hello", max_tokens=5, sampling=HOT), *other.retry(max_tokens=5),
                *other.edit(0, "the", max_tokens=5)]
        assert asyncio.run(talk(chat)) == want and chat.session.tokens == other.session.tokens


@pytest.mark.parametrize("options", [{}, {"budget_s": 0}, {"effort": "off"}, {"stop": "}"}])
def test_an_answer_follows_its_schema_whatever_is_thought(model, options):
    pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")
    if "effort" in options and not model.chat()._said.form.has_tools:
        options = {}
    with model.chat() as chat:
        for seed in range(4):
            sampling = Sampling(temperature=1.0, seed=seed, logit_bias={304: 6.0, 305: 6.0, 302: 4.0})
            text = "".join(chat.ask("Hello", max_tokens=300, schema=SCHEMA, sampling=sampling, **options))
            if chat.finish_reason == "stop":
                assert json.loads(text + options.get("stop", "")).keys() == {"yes"}
                assert chat.messages[-1]["content"] == text
            else:
                assert chat.finish_reason == "length"
        list(chat.ask("the", max_tokens=5))


def test_the_model_says_where_an_answer_ends_that_could_go_on(model):
    pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")
    xtml = model.chat()._said.form.has_tools
    end, options = (XTML_SPECIALS["<|close|>"], {"effort": "off"}) if xtml else (SPECIALS["<|im_end|>"], {})
    with model.chat() as chat:
        text = "".join(chat.ask("Hello", max_tokens=200, schema={"type": "integer"}, **options,
                                sampling=Sampling(logit_bias={end: 1000.0})))
        assert chat.finish_reason == "stop" and int(text) >= 0
        assert [token.id == end for token in chat.reply] == [False, True]       # a number, and the end


def test_a_thinking_chat_is_saved_with_all_it_has(model, tmp_path):
    if not model.chat()._said.form.has_tools:
        pytest.skip("this format has no thinking")
    with model.chat(system="the") as chat:
        events = list(chat.events("Hello", max_tokens=9, tools=TOOLS, effort="high", tool_choice="none", sampling=HOT))
        assert all(isinstance(event, Reasoning) for event in events) and chat.reply.reasoning
        chat.save(tmp_path / "a.state")
        with Chat.restore(model, tmp_path / "a.state") as again:
            assert again.messages == chat.messages and again.tokens_left == chat.tokens_left
            for one in (again, chat):
                list(one.ask("the", max_tokens=5, tools=TOOLS))
            assert again.session.tokens == chat.session.tokens
            assert "thinking_effort=high" in model.tokenizer.decode(again.session.tokens)
            assert "tool_choice" not in model.tokenizer.decode(again.session.tokens)
