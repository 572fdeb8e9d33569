"""Random walks through one text: forward, back, forks, saved and restored, paused and cancelled. Wherever a session is,
its logits are those of a session that read the same ids at once."""
import io
import random

import numpy as np
import pytest
from reference.checkpoint import kimi, write_checkpoint

import warp_embed
from warp_embed import Model
from warp_embed.convert import convert

LENGTH = 600                            # some tiles of latents, more than two checkpoint intervals
SHAPES = {"mixed": kimi(kda_head_dim=4, hidden_size=16), "mla": kimi(kda_layers=[], hidden_size=16),
          "kda": kimi(kda_layers=[1, 2, 3], kda_head_dim=4, hidden_size=16)}


@pytest.fixture(scope="module", params=SHAPES)
def container(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("walk")
    write_checkpoint(folder / "checkpoint", SHAPES[request.param])
    convert(folder / "checkpoint", folder / "model.waste", trunk="f32", experts="f32")
    return folder / "model.waste"


class Walk:
    def __init__(self, model, ids, seed):
        self.model, self.ids, self.rng = model, ids, random.Random(seed)
        self.sessions = [model.session()]

    def step(self, session):
        for _ in range(self.rng.randrange(1, 20)):
            if session.position < LENGTH:
                session.step(token=self.ids[session.position])

    def prefill(self, session):
        if session.position < LENGTH:
            session.prefill(self.ids[session.position:session.position + self.rng.randrange(1, 200)])

    def rewind(self, session):
        session.rewind(self.rng.randrange(session.position + 1))

    def sync(self, session):
        session.sync(self.ids[:self.rng.randrange(1, LENGTH)])

    def stray(self, session):
        """Leave the text and come back to it."""
        if session.position < LENGTH - 80:
            n = session.position
            session.prefill([self.rng.randrange(61) for _ in range(self.rng.randrange(1, 80))])
            session.sync(self.ids[:self.rng.randrange(1, n + 80)])

    def pause(self, session):
        if session.position < LENGTH:
            for _ in range(self.rng.randrange(1, 9)):
                if session.step(token=self.ids[session.position], budget_s=0) is not None:
                    return
            if self.rng.random() < 0.3:
                self.fork(session)
                self.check(session)
            if self.rng.random() < 0.5:
                session.cancel()
            else:
                while session.poll() is None:
                    pass

    def fork(self, session):
        if len(self.sessions) < 5:
            self.sessions.append(session.fork())

    def save(self, session):
        if session.position and len(self.sessions) < 5:
            file = io.BytesIO()
            session.save(file)
            self.sessions.append(self.model.restore(file.getvalue()))

    def close(self, session):
        if len(self.sessions) > 1:
            self.sessions.remove(session)
            session.close()

    def checkpoint(self, session):
        session.checkpoint()

    def check(self, session):
        n = session.position
        assert session.tokens == self.ids[:n]
        assert n == 0 or np.array_equal(session.logits, self.want[n - 1])


@pytest.mark.parametrize("kv", ["f16", "q8"])
def test_every_way_to_a_position_gives_its_logits(container, kv):
    ids = [int(i) for i in np.random.default_rng(3).integers(0, 61, LENGTH)]
    plan = warp_embed.plan(container, context=LENGTH, kv=kv)
    memory = plan.floor_bytes + 5 * (plan.session_bytes + (1 << 20))
    with Model.open(container, context=LENGTH, kv=kv, memory=memory, threads=1) as model:
        with model.session() as session:
            want = session.prefill(ids, all_logits=True)
        for seed in range(3):
            walk = Walk(model, ids, seed)
            walk.want = want
            for _ in range(60):
                session = walk.rng.choice(walk.sessions)
                name = walk.rng.choice("step prefill rewind sync stray pause fork save close checkpoint".split())
                getattr(walk, name)(session)
                for other in walk.sessions:
                    if other._pending is None:
                        walk.check(other)
            for session in walk.sessions:
                session.close()
