"""Which experts a text asks for, made up, and who would stay in a cache: what the real one is compared with."""
import numpy as np


def routes(tokens, n_layers, n_experts, top_k, skew=1.0, reuse=0.35, topic=400, seed=0):
    """int [tokens][n_layers][top_k], ascending: like a trained router's choices.

    skew : popularity of a layer's r-th favourite is 1 / r^skew
    reuse : how likely a token takes over a choice of the token before it
    topic : after so many tokens a quarter of the experts change places among the favourites
    """
    rng = np.random.default_rng(seed)
    popularity = 1.0 / np.arange(1, n_experts + 1) ** skew
    order = np.array([rng.permutation(n_experts) for _ in range(n_layers)])
    out = np.empty((tokens, n_layers, top_k), int)
    for t in range(tokens):
        if t % topic == topic - 1:
            for layer in range(n_layers):
                places = rng.choice(n_experts, n_experts // 4, replace=False)
                order[layer, places] = order[layer, rng.permutation(places)]
        for layer in range(n_layers):
            kept = out[t - 1, layer][rng.random(top_k) < reuse] if t else out[0, 0, :0]
            weight = np.empty(n_experts)
            weight[order[layer]] = popularity
            weight[kept] = 0
            fresh = rng.choice(n_experts, top_k - len(kept), replace=False, p=weight / weight.sum())
            out[t, layer] = np.sort(np.concatenate([kept, fresh]))
    return out


class Lru:
    """The least recently used goes."""

    def __init__(self, slots, n_records):
        self.slots, self.held, self.clock = slots, {}, 0
        self.hits = self.misses = 0

    def worth(self, record):
        return self.held[record]

    def use(self, record):
        self.clock += 1

    def get(self, record):
        if record in self.held:
            self.hits += 1
        else:
            self.misses += 1
            if len(self.held) == self.slots:
                del self.held[min(self.held, key=self.worth)]
        self.use(record)
        self.held[record] = self.clock


class Lfru(Lru):
    """The least often used goes, of those the least recently used. Uses are remembered after an eviction, and halved
    from time to time, as in cache.h; without what cache.h adds for tokens that repeat each other."""

    def __init__(self, slots, n_records):
        super().__init__(slots, n_records)
        self.uses = [0] * n_records
        self.age_at = 10 * slots + n_records

    def worth(self, record):
        return self.uses[record], self.held[record]

    def use(self, record):
        self.clock += 1
        self.uses[record] += 1
        if self.clock >= self.age_at:
            self.uses = [uses >> 1 for uses in self.uses]
            self.age_at = self.clock + max(10 * self.slots, len(self.uses))
