"""Choosing a token from logits."""
from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from warp_embed.errors import NumericError
from warp_embed.runtime.arguments import FINITE, integer, number

Floats = npt.NDArray[np.floating[Any]]
_ID, _WORD = (1 << 31) - 1, (1 << 64) - 1


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen; an immutable value. The default is greedy: the largest logit, the lowest id of equals.

    The fields are applied in this order.

    Parameters
    ----------
    logit_bias : mapping of int to float
        Added to the logits of these ids; ``-inf`` forbids one.
    repetition_penalty : float
        Logits of ids that occurred already are divided by it if positive and multiplied by it if negative. 1.0 is off.
    temperature : float
        Divides the logits. 0.0 chooses the largest and ignores what follows.
    top_k : int
        Only the so many largest (the lowest ids of equals). 0 is off.
    top_p : float
        Of those, only the smallest set of the most probable with at least this share. 1.0 is off.
    min_p : float
        Of those, only what is at least this share as probable as the most probable. 0.0 is off.
    seed : int, optional
        In [0, 2^64). The random number of a token depends on it and on the token's position only. None: the session's.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, high in (("temperature", FINITE), ("top_p", 1.0), ("min_p", 1.0), ("repetition_penalty", FINITE)):
            object.__setattr__(self, name, number(name, getattr(self, name), 0.0, high))
        if self.repetition_penalty == 0.0:
            raise ValueError("repetition_penalty must be above 0")
        object.__setattr__(self, "top_k", integer("top_k", self.top_k, 0, _ID))
        if self.seed is not None:
            object.__setattr__(self, "seed", integer("seed", self.seed, 0, _WORD))
        bias = {integer("an id in logit_bias", i, 0, _ID): number("a logit_bias", b, -math.inf, FINITE)
                for i, b in dict(self.logit_bias or {}).items()}
        object.__setattr__(self, "logit_bias", MappingProxyType(bias))

    def __reduce__(self) -> tuple[type[Sampling], tuple[Any, ...]]:
        return Sampling, (self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty,
                          dict(self.logit_bias), self.seed)


def choose(logits: Floats, sampling: Sampling, seed: int, position: int,
           tokens: Sequence[int] | npt.NDArray[np.integer[Any]],
           allowed: npt.NDArray[np.bool_] | None = None) -> tuple[int, float]:
    """One token from the logits of a position.

    Parameters
    ----------
    logits : ndarray, shape (vocab,), float32
        Read only.
    sampling : Sampling
    seed : int
        Used where `sampling` has none.
    position : int
        Index that the token will have.
    tokens : sequence of int
        The ids so far, for the repetition penalty.
    allowed : ndarray, shape (vocab,), bool, optional
        Where False, the token is never chosen.

    Returns
    -------
    token : int
    logprob : float
        Natural logarithm of its probability under the unmodified logits (temperature 1, nothing left out).

    Raises
    ------
    NumericError    a logit is NaN, or none is above -inf.
    ValueError      logit_bias names an id outside the vocabulary or forbids every token that is allowed.
    """
    total = _log_sum_exp(logits)
    if math.isnan(total) or total == -math.inf:
        raise NumericError(f"the logits at position {position} are not numbers; the weights may be damaged")
    changed = _adjust(logits, sampling, tokens)
    if allowed is not None:
        changed = np.where(allowed, changed, -np.inf)
    token = int(changed.argmax())                       # the lowest of equals
    best = float(changed[token])
    if best == -math.inf:
        raise ValueError("logit_bias forbids every token" + ("" if allowed is None else " that the grammar allows"))
    if sampling.temperature > 0.0 and sampling.top_k != 1 and best < math.inf:
        token = _draw(changed, best, sampling, _uniform(seed if sampling.seed is None else sampling.seed, position))
    chosen = float(logits[token])
    if chosen == math.inf:                              # the limit: all infinite ones share the probability
        return token, -math.log(np.count_nonzero(logits == math.inf))
    return token, chosen - total


def most_likely(logits: Floats, n: int) -> tuple[tuple[int, float], ...]:
    """(id, logprob) of the n largest of the logits (vocab,), the largest first, the lower id of equals; n <= vocab."""
    ids = _largest(logits, n) if n < len(logits) else np.arange(len(logits))
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    total = _log_sum_exp(logits)
    if total == math.inf:                               # as in choose
        share = -math.log(np.count_nonzero(logits == math.inf))
        return tuple((int(i), share if logits[i] == math.inf else -math.inf) for i in ids)
    return tuple((int(i), float(logits[i]) - total) for i in ids)


def _adjust(logits: Floats, sampling: Sampling, tokens: Iterable[int]) -> Floats:
    """Logits with bias and repetition penalty; the same array when there is nothing to change."""
    if not sampling.logit_bias and sampling.repetition_penalty == 1.0:
        return logits
    changed = logits.astype(np.float64)
    for token, bias in sampling.logit_bias.items():
        if token >= len(changed):
            raise ValueError(f"logit_bias names token {token}, but the vocabulary ends at {len(changed)}")
        changed[token] = -math.inf if bias == -math.inf else changed[token] + bias
    if sampling.repetition_penalty != 1.0:
        seen = np.zeros(len(changed), bool)
        seen[np.asarray(tokens, np.int64)] = True
        values = changed[seen]
        changed[seen] = np.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    return changed


def _draw(logits: Floats, best: float, sampling: Sampling, uniform: float) -> int:
    """The token at `uniform` in [0, 1) of the distribution that is left after temperature, top_k, top_p and min_p.

    best: the largest of the logits.
    """
    ids: npt.NDArray[np.intp] | None = None             # None: all, in order
    if 0 < sampling.top_k < len(logits):
        ids = _largest(logits, sampling.top_k)
        logits = logits[ids]
    with np.errstate(over="ignore"):                    # a tiny temperature: differences become -inf, as they should
        weight = logits.astype(np.float64)
        weight -= best
        weight /= sampling.temperature
        np.exp(weight, out=weight)
    if sampling.top_p < 1.0:
        kept = _nucleus(weight, sampling.top_p)
        ids = kept if ids is None else ids[kept]
        weight = weight[kept]
    if sampling.min_p > 0.0:
        weight = np.where(weight >= sampling.min_p, weight, 0.0)        # the most probable has weight 1
    sums = weight.cumsum()
    place = int(sums.searchsorted(uniform * float(sums[-1]), side="right"))
    if place == len(sums):                              # the product was rounded up to the sum
        place = int(np.flatnonzero(weight)[-1])
    return place if ids is None else int(ids[place])


def _largest(values: Floats, k: int) -> npt.NDArray[np.intp]:
    """Ascending indices of the k largest; of those equal to the smallest that is kept, the lowest indices."""
    edge = np.partition(values, len(values) - k)[len(values) - k]
    above = np.flatnonzero(values > edge)
    equal = np.flatnonzero(values == edge)[:k - len(above)]
    return np.sort(np.concatenate((above, equal)))


def _nucleus(weight: npt.NDArray[np.float64], share: float) -> npt.NDArray[np.intp]:
    """Indices of the fewest weights that make up `share` of the sum, at least one; the heaviest first."""
    total = float(weight.sum())
    # What is lighter makes up less than the rest of the sum, even if it is all the others: it need not be sorted.
    some = np.flatnonzero(weight >= (1.0 - share) * total / len(weight))
    some = some[(-weight[some]).argsort(kind="stable")]
    return some[:int(weight[some].cumsum().searchsorted(share * total)) + 1]


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but (seed, position): Philox4x64-10, as numpy.random.Philox has it."""
    a, b, c, d = position + 1, 0, 0, 0
    key, other_key = seed, 0
    for _ in range(10):
        low, high = a * 0xD2E7470EE14C6C93, c * 0xCA5A826395121157
        a, b, c, d = (high >> 64) ^ b ^ key, high & _WORD, (low >> 64) ^ d ^ other_key, low & _WORD
        key, other_key = (key + 0x9E3779B97F4A7C15) & _WORD, (other_key + 0xBB67AE8584CAA73B) & _WORD
    return (a >> 11) * 2.0 ** -53


def _log_sum_exp(logits: Floats) -> float:
    kernel = _kernel()
    if kernel is not None and logits.dtype == np.float32:
        return float(kernel(logits))
    top = float(np.max(logits))                         # NaN if any is
    if not math.isfinite(top):
        return top
    return top + math.log(np.exp(logits.astype(np.float64) - top).sum())


@functools.cache
def _kernel() -> Any:
    try:
        from warp_embed import _kernels
    except ImportError:
        return None
    return _kernels.log_sum_exp

