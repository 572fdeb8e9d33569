"""Who stays in the expert cache, on made-up routes with the skew and the reuse of real ones."""
import numpy as np
import pytest
from store.traces import Lfru, Lru, routes

from warp_embed._experts import ExpertStore
from warp_embed._store import RecordLayout, crc32

LAYERS, EXPERTS, TOP_K, TOKENS = 6, 64, 4, 600
RECORDS = LAYERS * EXPERTS
SHARES = (0.01, 0.03, 0.05, 0.08, 0.12, 0.25)         # of the records; a token uses 0.06 of them
TEXTS = {"usual": {}, "steep": {"skew": 1.4}, "flat": {"skew": 0.6}, "restless": {"topic": 60},
         "sticky": {"reuse": 0.6}, "no reuse": {"reuse": 0.0}}


@pytest.fixture(scope="module")
def banks(tmp_path_factory):
    """{layer: (path, n_experts, codebook_base)} of records of one page."""
    folder, layout = tmp_path_factory.mktemp("banks"), RecordLayout(0, 8, 8)
    body = bytes(layout.record_bytes - 48)
    for layer in range(LAYERS):
        with open(folder / f"{layer}.bin", "wb") as file:
            for expert in range(EXPERTS):
                file.write(layout.header(layer, expert, 0, crc32(body[:layout.end - 48])) + body)
    return layout, {layer: (folder / f"{layer}.bin", EXPERTS, 0) for layer in range(LAYERS)}


@pytest.fixture(scope="module")
def text():
    made = {}

    def get(name):
        if name not in made:
            made[name] = routes(TOKENS, LAYERS, EXPERTS, TOP_K, **TEXTS[name])
        return made[name]
    return get


def rate(cache, route):
    for token in route.tolist():
        for layer, experts in enumerate(token):
            for expert in experts:
                cache.get(layer * EXPERTS + expert)
    return cache.hits / (cache.hits + cache.misses)


def real_rate(banks, slots, route):
    layout, files = banks
    store = ExpertStore(layout, LAYERS, files, None, slots)
    for token in route.tolist():
        for layer, experts in enumerate(token):
            for expert in experts:
                store.record(layer, expert)
    stats = store.stats()
    store.close()
    assert stats["hits"] + stats["misses"] == route.size
    return stats["hits"] / route.size


def test_the_routes_are_what_they_say(text):
    route = text("usual")
    assert (np.diff(route, axis=2) > 0).all() and route.min() >= 0 and route.max() < EXPERTS
    again = np.mean([np.isin(b, a).mean() for a, b in zip(route[:-1, 0], route[1:, 0], strict=True)])
    assert 0.4 < again < 0.6            # taken over, or drawn again by chance
    counts = np.sort(np.bincount(route[:400, 0].ravel(), minlength=EXPERTS))[::-1]
    assert counts[:8].sum() > 0.4 * counts.sum() and (counts > 0).sum() > 0.9 * EXPERTS


@pytest.mark.parametrize("name", TEXTS)
def test_the_hit_rate_is_at_least_that_of_frequency_first_and_above_lru(banks, text, name):
    """Frequency alone loses to plain LRU where tokens repeat each other and a token's records fit; LRU keeps nothing
    where they do not fit."""
    route = text(name)
    for share in SHARES if name == "usual" else SHARES[1::2]:
        slots = max(1, round(share * RECORDS))
        lru, lfru, real = (rate(Lru(slots, RECORDS), route), rate(Lfru(slots, RECORDS), route),
                           real_rate(banks, slots, route))
        assert real >= lfru - 0.02, (share, real, lfru)
        assert real > lru, (share, real, lru)
        if name == "sticky" and slots > 1.2 * LAYERS * TOP_K:
            assert real > lfru + 0.08, (share, real, lfru)
