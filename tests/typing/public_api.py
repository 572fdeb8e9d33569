"""What a type checker sees of the public API. mypy reads it (`.ci/run`); nothing runs it."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import warp_embed
from warp_embed import Chat, MemoryPlan, Model, Sampling, Session, Token

Logits = npt.NDArray[np.float32]


def plan(path: Path) -> None:
    plan = warp_embed.plan(path, context=8192, kv="f16", threads=None, memory="auto")
    assert_type(plan, MemoryPlan)
    assert_type(plan.floor_bytes, int)
    assert_type(plan.budget_bytes, int)
    assert_type(plan.cache_bytes, int)
    warp_embed.plan(path, kv="f64")  # type: ignore[arg-type]


def model(path: str) -> None:
    with Model.open(path, memory=2**30, context=8192, threads=2, kv="q8", verify=False, on_progress=None) as model:
        assert_type(model, Model)
        assert_type(model.session(), Session)
        assert_type(model.restore("chat.state"), Session)
    model.session(1, 2, 3)  # type: ignore[call-arg]


def chat(model: Model) -> None:
    chat = model.chat(system="Be brief.")
    for text in chat.ask("Hello", max_tokens=9, stop="x", overflow="drop_oldest", schema={"type": "integer"}):
        assert_type(text, str)
    assert_type(chat.edit(1, "Hi", sampling=Sampling(), top_logprobs=3), Iterator[str])
    assert_type(chat.retry(grammar="start: /a/"), Iterator[str])
    assert_type(chat.messages, list[dict[str, Any]])
    assert_type(chat.count_tokens("Hello"), int)
    assert_type(chat.tokens_left, int)
    assert_type(chat.dropped, int)
    assert_type(chat.fork(), Chat)
    chat.save("a.state")
    assert_type(Chat.restore(model, "a.state"), Chat)
    chat.ask("Hello", overflow="forget")  # type: ignore[arg-type]
    chat.retry(max_token=3)  # type: ignore[call-arg]


async def asynchronous(session: Session, chat: Chat) -> None:
    assert_type(await session.aprefill([1, 2]), Logits)
    async for token in session.agenerate("Why?", max_tokens=3, top_logprobs=2):
        assert_type(token, Token)
    async for text in chat.aask("Why?", max_tokens=3):
        assert_type(text, str)


def session(session: Session) -> None:
    with session as same:
        assert_type(same, Session)
    assert_type(session.position, int)
    assert_type(session.logits, Logits | None)
    assert_type(session.prefill([1, 2, 3]), Logits)
    assert_type(session.prefill(np.arange(3), all_logits=True), Logits)
    assert_type(session.step(Sampling(temperature=0.7, top_p=0.95, seed=1)), Token | None)
    assert_type(session.step(token=42), Token | None)
    assert_type(session.step(budget_s=0.004), Token | None)
    for token in session.generate("Why?", max_tokens=64, stop=["\n\n"]):
        assert_type(token, Token)
        assert_type(token.id, int)
        assert_type(token.text, str)
        assert_type(token.logprob, float)
        assert_type(token.top_logprobs, tuple[tuple[int, float], ...])
    session.generate([1], stop_ids=[2], top_logprobs=3, schema="{}", grammar=None)
    session.save("a.state", note={"title": "x"})
    assert_type(session.note, dict[str, Any] | None)
    assert_type(session.embedding, Logits | None)
    assert_type(session.seed, int)
    assert_type(session.rewind(0), int)
    assert_type(session.sync([1, 2]), int)
    assert_type(session.fork(), Session)
    session.step("greedy")  # type: ignore[arg-type]


def values() -> None:
    sampling = Sampling(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.1, logit_bias={1: -1.0})
    assert_type(sampling.temperature, float)
    sampling.seed = 3  # type: ignore[misc]
    assert_type(warp_embed.demo_path(), str)
    assert_type(warp_embed.get_include(), str)
    assert_type(warp_embed.__version__, str)
