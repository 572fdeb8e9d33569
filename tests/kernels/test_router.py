"""The router: which experts, in what order, with what weights."""
import numpy as np
import pytest
from kernels.matrices import EPS

from warp_embed import _kernels


def by_definition(logits, top_k, bias, groups, top_groups, renormalize, scaling):
    s = 1 / (1 + np.exp(-logits.astype(np.float64)))
    score = (s + (0 if bias is None else bias)).astype(np.float32)
    by_group = score.reshape(groups, -1)
    sums = np.sort(by_group, 1)[:, -2:].sum(1)
    kept = np.lexsort((np.arange(groups), -sums))[:top_groups]
    allowed = np.zeros(len(logits), bool).reshape(groups, -1)
    allowed[kept] = True
    ids = np.flatnonzero(allowed)
    ids = np.sort(ids[np.lexsort((ids, -score[ids]))[:top_k]])
    weight = s[ids]
    return ids, weight / (weight.sum() + 1e-20 if renormalize else 1) * scaling


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("experts, top_k, groups, top_groups", [
    (1, 1, 1, 1), (8, 8, 1, 1), (16, 4, 4, 2), (24, 3, 8, 3), (16, 2, 16, 5), (256, 8, 1, 1), (256, 8, 8, 4),
    (896, 16, 1, 1)])
def test_routing_follows_its_definition(level, experts, top_k, groups, top_groups, renormalize):
    rng = np.random.default_rng(experts + groups)
    for bias in (None, rng.standard_normal(experts).astype(np.float32)):
        logits = rng.standard_normal(experts).astype(np.float32) * 3
        ids, weights = _kernels.route(logits, top_k, bias, groups, top_groups, renormalize, 2.446)
        expected, weight = by_definition(logits, top_k, bias, groups, top_groups, renormalize, np.float32(2.446))
        assert np.array_equal(ids, expected)
        assert (np.abs(weights - weight) <= (top_k + 4) * EPS * weight).all()


def test_equal_scores_go_to_the_lower_id_and_the_lower_group(level):
    assert _kernels.route(np.zeros(12), 3)[0].tolist() == [0, 1, 2]
    assert _kernels.route(np.zeros(12), 3, groups=4, top_groups=2)[0].tolist() == [0, 1, 2]
    logits = np.array([0, 0, 0, 5, 5, 0, 5, 5, 5], np.float32)
    assert _kernels.route(logits, 2)[0].tolist() == [3, 4]
    assert _kernels.route(logits, 2, groups=3, top_groups=1)[0].tolist() == [3, 4]
    assert _kernels.route(logits[[3, 4, 5, 0, 1, 2, 6, 7, 5]], 2, groups=3, top_groups=1)[0].tolist() == [0, 1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_ids_are_distinct_and_in_range_whatever_the_logits(level, value):
    for groups, top_groups in ((1, 1), (4, 2)):
        ids, _ = _kernels.route(np.full(16, value), 4, groups=groups, top_groups=top_groups)
        assert len(set(ids.tolist())) == 4 and ids.min() >= 0 and ids.max() < 16
        logits = np.zeros(16)
        logits[5] = value
        assert len(set(_kernels.route(logits, 4, groups=groups, top_groups=top_groups)[0].tolist())) == 4
