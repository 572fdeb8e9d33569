"""For tests: look inside a session, and make it take the routes of another one.

    with trace(session) as seen:
        session.prefill(prompt)
    ids, weights = seen.routing[layer]          # (tokens, top_k): ascending expert ids and their weights

    force_routing(other_session, seen)          # other_session now obeys, token for token
"""
from __future__ import annotations

from typing import Any

import numpy as np

from warp_embed.runtime.session import Session


class Recorder:
    """Hands arrays for the routing to a session's passes, and keeps what they leave there."""

    def __init__(self, session: Session) -> None:
        config = session.model.config
        self.layers = list(config.moe_layers)
        self.top_k, self.n_experts = config.top_k, config.n_experts
        self.start = session.position
        self.seen: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.recording = False
        self.waiting: tuple[int, int, dict[str, np.ndarray]] | None = None      # of a pass that may have been paused
        self.forced: dict[int, tuple[np.ndarray, np.ndarray]] = {}      # position -> [MoE layers][top_k]

    def arrays(self, position: int, n: int) -> dict[str, np.ndarray]:
        """Keyword arguments of State.advance for n tokens from a position."""
        if not self.layers:
            return {}
        shape = (len(self.layers), n, self.top_k)
        out: dict[str, np.ndarray] = {}
        if self.recording:
            if self.waiting is None or self.waiting[:2] != (position, n):
                self.waiting = position, n, {
                    "trace_idx": np.zeros(shape, np.int32), "trace_weight": np.zeros(shape, np.float32),
                    "trace_logits": np.zeros((*shape[:2], self.n_experts), np.float32)}
            out |= self.waiting[2]
        if self.forced:
            pairs = [self.forced[position + t] for t in range(n)]       # KeyError: the trace does not reach so far
            out |= {"forced_idx": np.ascontiguousarray(np.stack([idx for idx, _ in pairs], 1)),
                    "forced_weight": np.ascontiguousarray(np.stack([weight for _, weight in pairs], 1))}
        return out

    def committed(self, trace_idx: np.ndarray | None = None, trace_weight: np.ndarray | None = None,
                  trace_logits: np.ndarray | None = None, **_: object) -> None:
        """The pass that was given these arrays was committed."""
        if trace_idx is not None and trace_weight is not None and trace_logits is not None:
            self.seen.append((trace_idx, trace_weight, trace_logits))
        self.waiting = None


class Trace:
    """What a session routed since :func:`trace`, and the state it has now.

    Attributes
    ----------
    start : int
        Position of the first recorded token.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._recorder = _recorder(session)
        self._recorder.recording = True
        self._recorder.seen = []
        self.start = session.position

    @property
    def routing(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """MoE layer -> (ids int32, weights float32), each (tokens, top_k), ids ascending, scaling included.

        What the router chose, also where another choice was forced upon the session.
        """
        ids, weights = self._joined(0, np.int32), self._joined(1, np.float32)
        return {layer: (ids[i], weights[i]) for i, layer in enumerate(self._recorder.layers)}

    @property
    def router_logits(self) -> dict[int, np.ndarray]:
        """MoE layer -> float32 (tokens, experts), before sigmoid and bias."""
        logits = self._joined(2, np.float32)
        return {layer: logits[i] for i, layer in enumerate(self._recorder.layers)}

    def _joined(self, part: int, dtype: type) -> np.ndarray:
        width = self._recorder.n_experts if part == 2 else self._recorder.top_k
        empty: np.ndarray = np.zeros((len(self._recorder.layers), 0, width), dtype)
        return np.concatenate([empty, *(arrays[part] for arrays in self._recorder.seen)], 1)

    @property
    def kda_states(self) -> dict[int, np.ndarray]:
        """KDA layer -> S, float32 [H][dk][dv]."""
        return {layer: self._state.kda_state(layer)[0] for layer in sorted(self._config.kda_layers)}

    @property
    def conv_tails(self) -> dict[int, np.ndarray]:
        """KDA layer -> last inputs of the q, k, v convolutions, float32 [3][C][K - 1], oldest first."""
        return {layer: self._state.kda_state(layer)[1] for layer in sorted(self._config.kda_layers)}

    @property
    def latents(self) -> dict[int, np.ndarray]:
        """MLA layer -> float32 (position, kv_lora + rope): normed latent, then rope key, as the cache holds them."""
        layers = (layer for layer in range(self._config.n_layers) if not self._config.is_kda(layer))
        return {layer: self._state.latents(layer) for layer in layers}

    def stop(self) -> None:
        """Record no further tokens."""
        self._recorder.recording = False

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def _state(self) -> Any:
        return self._session._state

    @property
    def _config(self) -> Any:
        return self._session.model.config


def trace(session: Session) -> Trace:
    """Start recording the routing of a session."""
    return Trace(session)


def force_routing(session: Session, source: Trace | None) -> None:
    """Make a session route as `source` did, position by position; None: by its own router again.

    A token at a position that `source` did not see raises KeyError; a trace of another model's shape, ValueError.
    """
    recorder = _recorder(session)
    recorder.forced = {}
    if source is None:
        return
    routing = source.routing
    if list(routing) != recorder.layers:
        raise ValueError(f"a trace of layers {list(routing)} for a model with experts in layers {recorder.layers}")
    if not routing:
        return
    idx, weight = (np.stack([routing[layer][part] for layer in recorder.layers]) for part in (0, 1))
    if idx.size and (idx.shape[2] != recorder.top_k or idx.min() < 0 or idx.max() >= recorder.n_experts
                     or (np.diff(idx, axis=2) <= 0).any()):
        raise ValueError(f"a trace that does not choose {recorder.top_k} of {recorder.n_experts} experts, ascending")
    recorder.forced = {source.start + t: (idx[:, t], weight[:, t]) for t in range(idx.shape[1])}


def _recorder(session: Session) -> Recorder:
    if session._recorder is None:
        session._recorder = Recorder(session)
    return session._recorder
