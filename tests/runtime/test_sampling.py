import copy
import dataclasses
import math
import pickle
import time

import numpy as np
import pytest

from warp_embed.errors import NumericError
from warp_embed.runtime.sampling import Sampling, _uniform, choose

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.3, 0.15], np.float32))


def counts(sampling, logits=LOGITS, n=4000, tokens=()):
    drawn = [choose(logits, sampling, 7, p, tokens)[0] for p in range(n)]
    return np.bincount(drawn, minlength=len(logits)) / n


def chi_square(observed, expected, n):
    keep = expected > 0
    assert not observed[~keep].any()
    return n * ((observed[keep] - expected[keep]) ** 2 / expected[keep]).sum()


def test_the_default_is_greedy_and_the_lowest_of_equals():
    assert choose(np.float32([0, 3, 1, 3]), Sampling(), 0, 0, ())[0] == 1


def test_logprob_is_that_of_the_unmodified_softmax():
    logits = np.random.default_rng(1).normal(0, 5, 1000).astype(np.float32)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    changed = Sampling(temperature=3.0, top_k=50, top_p=0.8, repetition_penalty=1.3, logit_bias={3: 5.0})
    for position in range(50):
        token, logprob = choose(logits, changed, 1, position, [1, 2, 3])
        assert abs(logprob - exact[token]) < 1e-5


@pytest.mark.parametrize("sampling, expected", [
    (Sampling(temperature=1.0), [0.05, 0.4, 0.1, 0.3, 0.15]),
    (Sampling(temperature=0.5), np.square([0.05, 0.4, 0.1, 0.3, 0.15])),
    (Sampling(temperature=1.0, top_k=2), [0, 0.4, 0, 0.3, 0]),
    (Sampling(temperature=1.0, top_k=99), [0.05, 0.4, 0.1, 0.3, 0.15]),
    (Sampling(temperature=1.0, top_p=0.65), [0, 0.4, 0, 0.3, 0]),
    (Sampling(temperature=1.0, top_p=0.71), [0, 0.4, 0, 0.3, 0.15]),
    (Sampling(temperature=1.0, top_p=0.0), [0, 1, 0, 0, 0]),
    (Sampling(temperature=1.0, min_p=0.3), [0, 0.4, 0, 0.3, 0.15]),
    (Sampling(temperature=1.0, min_p=1.0), [0, 1, 0, 0, 0]),
    (Sampling(temperature=1.0, logit_bias={1: -math.inf, 0: math.log(4)}), [0.2, 0, 0.1, 0.3, 0.15]),
    # top_k comes before top_p: 0.4 and 0.3 are then 57 % and 43 %
    (Sampling(temperature=1.0, top_k=2, top_p=0.5), [0, 1, 0, 0, 0]),
    # the temperature comes before top_p: at 1e9 all are equally probable, and 0.7 takes four of five
    (Sampling(temperature=1e9, top_p=0.7), [0, 1, 1, 1, 1]),
])
def test_the_distribution_follows_the_transforms_in_order(sampling, expected):
    expected = np.asarray(expected) / np.sum(expected)
    assert chi_square(counts(sampling), expected, 4000) < 18.5       # 99.9 % at four degrees of freedom


def test_the_repetition_penalty_divides_positive_and_multiplies_negative_logits_once_per_id():
    logits = np.float32([2.0, 1.2, -1.0, -1.5])
    def greedy(penalty, tokens, **bias):
        return choose(logits, Sampling(repetition_penalty=penalty, **bias), 0, 0, tokens)[0]
    assert greedy(1.5, [0, 0, 0]) == 0                  # 2 / 1.5 > 1.2: once, not three times
    assert greedy(1.7, [0]) == 1
    assert greedy(1.0, [0]) == 0
    ban = {"logit_bias": {0: -math.inf, 1: -math.inf}}
    assert greedy(1.4, np.array([2]), **ban) == 2 and greedy(1.6, np.array([2]), **ban) == 3


def test_equal_logits_at_the_edge_of_top_k_go_to_the_lowest_ids():
    logits = np.float32([1, 5, 1, 1, 5, 1])
    assert set(np.flatnonzero(counts(Sampling(temperature=100.0, top_k=4), logits, 400))) == {0, 1, 2, 4}


def test_a_large_vocabulary_gives_the_same_nucleus_as_a_full_sort():
    logits = np.random.default_rng(3).normal(0, 0.5, 20_000).astype(np.float32)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = set(order[:np.searchsorted(np.cumsum(p[order]), 0.9) + 1])
    drawn = {choose(logits, Sampling(temperature=1.0, top_p=0.9), 5, i, ())[0] for i in range(300)}
    assert len(kept) > 1024 and drawn <= kept


def test_the_random_number_depends_on_seed_and_position_only():
    flat = np.zeros(1 << 16, np.float32)
    hot = Sampling(temperature=1.0)
    first = [choose(flat, hot, 11, p, ())[0] for p in range(100)]
    assert [choose(flat, hot, 11, p, [1, 2])[0] for p in reversed(range(100))] == first[::-1]
    assert [choose(flat, Sampling(temperature=1.0, seed=11), 99, p, ())[0] for p in range(100)] == first
    assert len({*first, *(choose(flat, hot, 12, p, ())[0] for p in range(100))}) > 190
    choose(flat, hot, 2**64 - 1, 2**40, ())


def test_the_random_number_is_that_of_philox():
    for seed in (0, 1, 2**63 + 5, 2**64 - 1):
        for position in (0, 1, 255, 2**40):
            word = int(np.random.Philox(key=seed, counter=position).random_raw())
            assert _uniform(seed, position) == (word >> 11) * 2.0 ** -53


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-4, 1e30, 1.7e308])
@pytest.mark.parametrize("extra", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_extreme_temperatures(temperature, extra):
    with np.errstate(all="raise", under="ignore"):
        drawn = {choose(LOGITS, Sampling(temperature=temperature, **extra), 1, p, ())[0] for p in range(200)}
    assert drawn == {1} if temperature < 1e-3 else len(drawn) > 2


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.5)])
def test_logits_that_are_not_numbers(sampling):
    for bad in ([0, np.nan, 1], [-np.inf] * 3, [np.nan, np.inf]):
        with pytest.raises(NumericError):
            choose(np.float32(bad), sampling, 0, 0, ())
    assert choose(np.float32([0, np.inf, 1]), sampling, 0, 0, ()) == (1, 0.0)
    assert choose(np.float32([0, -np.inf, 1]), sampling, 0, 0, ())[0] in (0, 2)
    assert choose(np.float32([4]), sampling, 0, 0, ()) == (0, 0.0)


def test_forbidden_tokens():
    with pytest.raises(ValueError, match="forbids every"):
        choose(LOGITS, Sampling(logit_bias=dict.fromkeys(range(5), -math.inf)), 0, 0, ())
    with pytest.raises(ValueError, match="token 5"):
        choose(LOGITS, Sampling(logit_bias={5: 1.0}), 0, 0, ())


@pytest.mark.parametrize("field, value, error", [
    ("temperature", -0.1, ValueError), ("temperature", math.nan, ValueError), ("temperature", math.inf, ValueError),
    ("temperature", "1", TypeError), ("temperature", True, TypeError),
    ("top_k", -1, ValueError), ("top_k", 1.5, TypeError), ("top_k", True, TypeError),
    ("top_p", 1.1, ValueError), ("top_p", -0.1, ValueError), ("top_p", math.nan, ValueError),
    ("min_p", 2, ValueError), ("min_p", math.nan, ValueError),
    ("repetition_penalty", 0, ValueError), ("repetition_penalty", math.inf, ValueError),
    ("logit_bias", {1: math.nan}, ValueError), ("logit_bias", {1: math.inf}, ValueError),
    ("logit_bias", {-1: 1.0}, ValueError), ("logit_bias", {"a": 1.0}, TypeError),
    ("seed", -1, ValueError), ("seed", 2**64, ValueError), ("seed", 1.0, TypeError), ("seed", False, TypeError),
])
def test_values_out_of_range_are_refused(field, value, error):
    with pytest.raises(error):
        Sampling(**{field: value})


def test_sampling_is_an_immutable_value():
    bias = {3: 1.0}
    sampling = Sampling(temperature=1, logit_bias=bias, seed=np.uint64(2**63))
    bias[4] = 2.0
    assert dict(sampling.logit_bias) == {3: 1.0} and sampling.seed == 2**63
    with pytest.raises(TypeError):
        sampling.logit_bias[4] = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        sampling.top_k = 3
    same = Sampling(temperature=1.0, logit_bias={3: 1.0}, seed=2**63)
    assert sampling == same and hash(sampling) == hash(same) and sampling != Sampling()
    assert pickle.loads(pickle.dumps(sampling)) == copy.deepcopy(sampling) == sampling
    assert dataclasses.replace(sampling, top_k=5).logit_bias == {3: 1.0}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_k=40),
                                      Sampling(temperature=0.7, top_p=0.95)])
def test_a_released_vocabulary_takes_milliseconds(sampling):
    logits = np.random.default_rng(1).normal(0, 3, 163_840).astype(np.float32)
    choose(logits, sampling, 0, 0, ())
    best = min(_timed(lambda p=p: choose(logits, sampling, 0, p, ())) for p in range(10))
    assert best < 0.1


def _timed(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
