"""What a generation tells beside its tokens: the likeliest alternatives, the hidden vector; and where it stops."""
import numpy as np
import pytest

from warp_embed import Model, Sampling
from warp_embed.runtime.sampling import most_likely


def softmax64(logits):
    exps = np.exp(logits.astype(np.float64) - logits.max())
    return np.log(exps / exps.sum())


@pytest.mark.parametrize("n", [1, 5, 256])
def test_top_logprobs_are_those_of_the_unmodified_logits(model, prompt, n):
    with model.session() as session:
        want = softmax64(session.prefill(prompt))
        sampling = Sampling(temperature=2.0, top_k=3, seed=1)
        for token in session.generate(max_tokens=8, sampling=sampling, top_logprobs=n):
            ids, logprobs = zip(*token.top_logprobs, strict=True)
            assert list(ids) == sorted(range(len(want)), key=lambda i: (-want[i], i))[:n]
            assert np.abs(np.array(logprobs) - want[list(ids)]).max() < 1e-5
            assert abs(token.logprob - want[token.id]) < 1e-5
            want = softmax64(session.logits)
        assert session.step().top_logprobs == ()
        token = None
        while token is None:                            # a pause does not lose them
            token = session.step(top_logprobs=n, budget_s=0)
        assert len(token.top_logprobs) == n


def test_equals_are_ordered_by_id():
    assert [i for i, _ in most_likely(np.array([1, 3, 3, 0, 3], np.float32), 2)] == [1, 2]
    assert most_likely(np.array([0, np.inf, np.inf], np.float32), 3)[0] == (1, -np.log(2))


@pytest.mark.parametrize("n, error", [(-1, ValueError), (257, ValueError), (True, TypeError), (1.0, TypeError)])
def test_an_impossible_n_is_refused(model, n, error):
    with model.session() as session:
        for call in (lambda: session.step(token=1, top_logprobs=n), lambda: session.generate([1], top_logprobs=n)):
            with pytest.raises(error):
                call()
        assert session.position == 0


def test_the_embedding_is_what_the_logits_are_made_of(model, prompt):
    unembedding = model._trunk.decode("lm_head.weight")
    with model.session() as session:
        assert session.embedding is None
        for token in (3, 4):
            session.step(token=token)
            hidden = session.embedding
            assert hidden.shape == (model.config.hidden,) and hidden.dtype == np.float32
            assert np.abs(unembedding.astype(np.float64) @ hidden - session.logits).max() < 1e-3
        hidden[:] = 0                                   # a copy
        assert session.embedding.any()
        before = session.embedding
        session.step(token=9)
        session.rewind(2)
        assert np.array_equal(session.embedding, before)


def test_stop_ids_end_a_text_and_are_not_evaluated(model, prompt):
    with model.session() as session:
        ids = [token.id for token in session.generate(prompt, max_tokens=10)]
        session.rewind(len(prompt))
        last = ids[5]
        tokens = list(session.generate(max_tokens=10, stop_ids=[last, 255]))
        assert [t.id for t in tokens] == ids[:ids.index(last) + 1] and tokens[-1].finish_reason == "stop"
        assert session.position == len(prompt) + len(tokens) - 1
        with pytest.raises(ValueError):
            session.generate(stop_ids=[256])


def test_the_seed_is_saved_and_forked(tiny, prompt, tmp_path):
    with Model.open(tiny, context=160) as model, model.session() as session:
        session.prefill(prompt[:3])
        session.save(tmp_path / "a.state", note={"title": "é", "n": [1, None]})
        with model.restore(tmp_path / "a.state") as again, session.fork() as twin:
            assert again.seed == twin.seed == session.seed and again.note == {"title": "é", "n": [1, None]}
            assert session.note is None


@pytest.mark.parametrize("note, error", [([1], TypeError), ({"a": object()}, TypeError),
                                         ({"a": float("nan")}, ValueError), ({"a": "x" * (1 << 24)}, ValueError)])
def test_a_note_that_is_no_json_is_refused(model, prompt, tmp_path, note, error):
    with model.session() as session:
        session.prefill(prompt[:3])
        with pytest.raises(error):
            session.save(tmp_path / "a.state", note=note)
    assert not list(tmp_path.iterdir())
