"""What one layer of each kind costs a token, and the whole release by extrapolation.

A step without a budget's time to spare returns after every layer, and after every expert but the last of a layer: the
engine needs no clock inside, and one model is enough. A layer's time is that of all its pieces. The last layer's last
piece has the logits in it, which are timed by themselves.
"""
import statistics

import numpy as np

from benchmarks import random_model
from warp_embed.runtime.config import ModelConfig


def kind(config, layer):
    return f"{'KDA' if config.is_kda(layer) else 'MLA'} + {'experts' if config.is_moe(layer) else 'dense'}"


def sample(model, session, token, clock):
    """{kind of layer, or "logits": [seconds, ...]} of one token."""
    spent, out = {}, {}
    state, config = session._state, model.config
    done = None
    while done is None:
        layer, begin = state.paused_layer, clock()
        done = session.step(token=token, budget_s=0)
        spent[layer] = spent.get(layer, 0) + clock() - begin
    logits, begin = np.empty(config.vocab, np.float32), clock()
    state.logits_again(logits)
    out["logits"] = [clock() - begin]
    spent[config.n_layers - 1] -= out["logits"][0]
    for layer, seconds in spent.items():
        out.setdefault(kind(config, layer), []).append(seconds)
    return out


def typical(samples):
    """Median seconds of each kind, of what `sample` gave."""
    kinds = {name for one in samples for name in one}
    return {name: statistics.median(s for one in samples for s in one.get(name, ())) for name in kinds}


def released(seconds, config, whole, trunk, experts):
    """Seconds and bytes of a token of a whole release, from the kinds of a model that has fewer layers.

    config, whole : raw configs; trunk, experts : encodings, as `warp-embed convert` names them."""
    shape = ModelConfig.parse(whole)
    total = sum(seconds[kind(shape, layer)] for layer in range(shape.n_layers))
    total += seconds["logits"] * shape.vocab / config["vocab_size"]
    trunk_bytes, expert_bytes = random_model.released_bytes(whole, trunk, experts)
    return {"layers": shape.n_layers, "s/token": total, "trunk GB/token": trunk_bytes / 1e9,
            "experts GB/token": expert_bytes / 1e9}
