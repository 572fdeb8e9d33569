"""Edits, retries, dropped turns, saved chats: over a made-up session, with what it had to read counted."""
import pytest
from scripted import Model, says, transcript
from vocabulary import write

from warp_embed import Sampling
from warp_embed.errors import Cancelled, ContextFull, RecordError, StateError
from warp_embed.runtime.chat import Chat

HOT = Sampling(temperature=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("model"))


@pytest.fixture
def tok(folder):
    return Model(folder).tokenizer


def talk(chat, *questions, **options):
    """Ask questions that are answered by themselves in capitals."""
    for question in questions:
        says(chat, question.upper())
        assert "".join(chat.ask(question, **options)) == question.upper()


def holds(chat, tok, *turns):
    """Whether the session and the messages are exactly these turns; pairs that were dropped are only messages."""
    said = [("system", "Sys")] * (turns[0][0] == "system") if chat.dropped else []
    assert [(m["role"], m["content"]) for m in chat.messages[-len(turns) + len(said):]] == list(turns[len(said):])
    return chat.session.tokens == transcript(tok, *turns)


def pair(question):
    return ("user", question), ("assistant", question.upper())


@pytest.fixture
def chat(folder):
    chat = Chat(Model(folder), system="Sys")
    talk(chat, "one", "two", "three")
    return chat


def test_an_edited_question_forgets_what_followed(chat, tok):
    before = chat.session.read
    says(chat, "x")
    assert "".join(chat.edit(3, "zwei")) == "x"
    assert holds(chat, tok, ("system", "Sys"), *pair("one"), ("user", "zwei"), ("assistant", "x"))
    assert chat.session.read - before == len(transcript(tok, ("user", "zwei"), ("assistant", ""))), "only the new turn"
    talk(chat, "four")
    assert holds(chat, tok, ("system", "Sys"), *pair("one"), ("user", "zwei"), ("assistant", "x"), *pair("four"))


def test_the_first_question_is_edited_behind_the_system_turn(chat, tok):
    before = chat.session.read
    says(chat, "x")
    list(chat.edit(1, "eins"))
    assert holds(chat, tok, ("system", "Sys"), ("user", "eins"), ("assistant", "x"))
    assert chat.session.read - before == len(transcript(tok, ("user", "eins"), ("assistant", "")))


def test_a_retry_reads_nothing_but_the_end_of_its_own_reply(chat, tok):
    before = chat.session.read
    says(chat, "other")
    assert "".join(chat.retry()) == "other"
    assert holds(chat, tok, ("system", "Sys"), *pair("one"), *pair("two"), ("user", "three"), ("assistant", "other"))
    assert chat.session.read - before == 1 and chat.finish_reason == "stop"      # the suffix


def test_every_attempt_draws_new_numbers_unless_the_seed_is_given(chat):
    for sampling in (HOT, HOT, None, Sampling(temperature=1.0, seed=3), HOT):
        says(chat, "x")
        list(chat.retry(sampling=sampling))
    first, second, greedy, given, fifth = chat.session.seeds[-5:]
    assert greedy is None and given == 3
    assert len({first, second, fifth, None, chat.session.seed}) == 5
    says(chat, "x")
    list(chat.edit(1, "one", sampling=HOT))
    assert chat.session.seeds[-1] is None               # the session's: a first attempt again


@pytest.mark.parametrize("call, error", [
    (lambda c: c.edit(0, "x"), ValueError), (lambda c: c.edit(2, "x"), ValueError),
    (lambda c: c.edit(7, "x"), IndexError), (lambda c: c.edit(-1, "x"), IndexError),
    (lambda c: c.edit(True, "x"), TypeError), (lambda c: c.edit(1, 3), TypeError),
    (lambda c: c.edit("1", "x"), TypeError), (lambda c: c.edit(1, "x", overflow="x"), ValueError),
    (lambda c: c.edit(1, "x", nonsense=1), TypeError), (lambda c: c.retry(max_tokens=0), ValueError),
])
def test_bad_calls_are_refused_at_once(chat, tok, call, error):
    with pytest.raises(error):
        call(chat)
    assert holds(chat, tok, ("system", "Sys"), *pair("one"), *pair("two"), *pair("three"))


def test_nothing_to_retry(folder):
    for chat in (Chat(Model(folder)), Chat(Model(folder), system="Sys")):
        with pytest.raises(StateError, match="nothing was asked"):
            chat.retry()


def test_an_edit_that_fails_leaves_the_chat_as_it_was(chat, tok):
    chat.session.trouble = (2, RecordError("damaged"))
    with pytest.raises(RecordError):
        list(chat.edit(1, "eins"))
    assert len(chat.messages) == 7
    talk(chat, "four")                                  # reads again what the edit had cut
    assert holds(chat, tok, ("system", "Sys"), *pair("one"), *pair("two"), *pair("three"), *pair("four"))


def test_a_question_that_was_cancelled_is_read_on_by_a_retry(chat, tok):
    position = chat.session.position
    chat.session.trouble = (3, Cancelled())
    assert list(chat.ask("four")) == [] and chat.finish_reason == "cancelled"
    assert chat.session.position == position + 3
    before = chat.session.read
    says(chat, "FOUR")
    assert "".join(chat.retry()) == "FOUR"
    assert holds(chat, tok, ("system", "Sys"), *pair("one"), *pair("two"), *pair("three"), *pair("four"))
    assert chat.session.read - before == len(transcript(tok, ("user", "four"), ("assistant", ""))) - 3


def test_a_cancel_between_two_pieces_ends_the_reply(chat, tok):
    says(chat, "abc")
    chat.session.cancel = lambda: None                  # as if it had come when no call was running
    pieces = []
    for piece in chat.ask("four"):
        pieces.append(piece)
        chat.cancel()
    assert pieces == ["a"] and chat.finish_reason == "cancelled"
    chat.session.script.clear()
    talk(chat, "five")
    assert holds(chat, tok, ("system", "Sys"), *pair("one"), *pair("two"), *pair("three"), ("user", "four"),
                 ("assistant", "a"), *pair("five"))


@pytest.mark.parametrize("reply, stop, shown", [
    ("one, two; the", [", t", "zzz"], "one"), ("one the end", ["he"], "one t"), ("aaaa", "a", ""),
    ("Hello éé", ["é"], "Hello "), ("中文", ["文"], "中"), ("ends with stop", ["stop"], "ends with "),
])
def test_a_stop_string_is_cut_from_the_session_too(folder, tok, reply, stop, shown):
    chat = Chat(Model(folder))
    says(chat, reply)
    assert "".join(chat.ask("Hi", stop=stop)) == shown and chat.finish_reason == "stop"
    assert chat.session.tokens[-1] == chat._said.form.stop
    text = tok.decode(chat.session.tokens)
    assert text == tok.decode(transcript(tok, ("user", "Hi"), ("assistant", shown)))
    assert chat.messages[-1]["content"] == shown


def test_counting_tokens(chat, tok):
    assert chat.tokens_left == 1000 - chat.session.position
    left, cost = chat.tokens_left, chat.count_tokens("four")
    says(chat, "abc")
    reply = chat.ask("four")
    next(reply)
    assert chat.tokens_left == left - cost - 1
    list(reply)
    assert chat.tokens_left == left - cost - 4


# ---- a context that is too small ----

def small(folder, turns, extra=0):
    """A chat whose context has room for so many turns of one letter behind the system's, and 4 letters more."""
    model = Model(folder)
    size = len(transcript(model.tokenizer, ("system", "Sys"))) + turns * len(transcript(model.tokenizer, *pair("a")))
    return Chat(Model(folder, context=size + 4 + extra), system="Sys")


def test_a_full_context_refuses_by_default(folder, tok):
    chat = small(folder, 2)
    talk(chat, "a", "b", max_tokens=5)
    before = chat.session.read, chat.session.tokens
    with pytest.raises(ContextFull, match="drop_oldest") as error:
        list(chat.ask("c", max_tokens=5))
    assert error.value.context == chat.session.context < error.value.needed
    assert (chat.session.read, chat.session.tokens) == before and len(chat.messages) == 5 and chat.dropped == 0


def test_the_oldest_turns_are_dropped_on_request(folder, tok):
    chat = small(folder, 3)
    for question in "abc":
        talk(chat, question, max_tokens=5, overflow="drop_oldest")
    assert chat.dropped == 0
    talk(chat, "d", max_tokens=5, overflow="drop_oldest")
    assert chat.dropped == 1 and len(chat.messages) == 9
    assert holds(chat, tok, ("system", "Sys"), *pair("b"), *pair("c"), *pair("d"))
    talk(chat, "e", max_tokens=chat.session.context, overflow="drop_oldest")        # all that can go
    assert chat.dropped == 4 and holds(chat, tok, ("system", "Sys"), *pair("e"))
    with pytest.raises(ContextFull):
        list(chat.ask("x" * 1000, overflow="drop_oldest"))
    assert chat.dropped == 4 and holds(chat, tok, ("system", "Sys"), *pair("e"))


def test_a_dropped_question_can_be_edited(folder, tok):
    chat = small(folder, 3)
    for question in "abcd":
        talk(chat, question, max_tokens=5, overflow="drop_oldest")
    says(chat, "X")
    list(chat.edit(5, "x", max_tokens=5))               # in place of c: b is still seen, a is not
    assert chat.dropped == 1 and holds(chat, tok, ("system", "Sys"), *pair("b"), *pair("x"))
    says(chat, "Y")
    list(chat.edit(1, "y", max_tokens=5))
    assert chat.dropped == 0 and holds(chat, tok, ("system", "Sys"), *pair("y"))


# ---- a chat from a session that was saved somehow ----

def test_messages_are_found_in_a_session(chat, tok):
    again = Chat.from_session(chat.session, chat.messages)
    before = chat.session.read
    says(again, "x")
    assert "".join(again.edit(5, "drei")) == "x"
    assert holds(again, tok, ("system", "Sys"), *pair("one"), *pair("two"), ("user", "drei"), ("assistant", "x"))
    assert chat.session.read - before == len(transcript(tok, ("user", "drei"), ("assistant", "")))


@pytest.mark.parametrize("forged", [
    [], [{"role": "user", "content": "uno"}, {"role": "assistant", "content": "ONE"}],
    [{"role": "system", "content": "Sys"}], [{"role": "tool", "content": "x"}],
    [{"role": "assistant", "content": "ONE"}],
])
def test_messages_that_are_not_in_a_session_can_only_be_read(chat, tok, forged):
    turns = ("system", "Sys"), *pair("one"), *pair("two"), *pair("three")
    again = Chat.from_session(chat.session, forged)
    assert again.messages == forged
    with pytest.raises((StateError, ValueError, IndexError)):
        again.edit(0, "x")
    with pytest.raises(StateError):
        again.retry()
    talk(again, "four")
    assert chat.session.tokens == transcript(tok, *turns, *pair("four"))
    says(again, "x")
    list(again.edit(len(forged), "vier"))
    assert chat.session.tokens == transcript(tok, *turns, ("user", "vier"), ("assistant", "x"))
