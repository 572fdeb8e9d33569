"""Text that follows a JSON schema or a grammar: before every token, the ids that may come next. By llguidance.

What llguidance costs on a vocabulary of 163,840: the first use on a model reads the vocabulary, which takes it about
0.15 s of CPU, all with the GIL held, and some 40 MB beside the budget; a grammar takes about 1 ms and a mask 0.1 to
2 ms, both without the GIL. A program whose window may not stall for 0.15 s makes a first call before it opens one.
"""
from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from warp_embed.runtime.tokenizer import Tokenizer

# One space or none: a model that likes white space would spend its tokens on it.
_JSON_DEFAULTS = {"whitespace_pattern": r"\x20?"}
log = logging.getLogger("warp_embed")
_lock = threading.Lock()
_vocabularies: weakref.WeakKeyDictionary[Tokenizer, Any] = weakref.WeakKeyDictionary()


class Guide:
    """Where a text stands in its grammar.

    Parameters
    ----------
    tokenizer : Tokenizer
    schema : dict or str, optional
        A JSON schema, perhaps as JSON text.
    grammar : str, optional
        In Lark's syntax, as llguidance reads it. One of the two.

    Attributes
    ----------
    ended : bool
        The text is complete and nothing may follow.

    Raises
    ------
    ImportError     llguidance is not installed.
    TypeError       both are given, or of another type.
    ValueError      the schema or grammar is not sound, in the words of llguidance.
    """

    def __init__(self, tokenizer: Tokenizer, schema: Mapping[str, Any] | str | None = None,
                 grammar: str | None = None) -> None:
        if schema is not None and grammar is not None:
            raise TypeError("give a schema or a grammar, not both")
        llguidance = _library()
        if grammar is None:
            source = _json_grammar(llguidance, schema)
        elif isinstance(grammar, str):
            source = llguidance.LLMatcher.grammar_from_lark(grammar)
        else:
            raise TypeError(f"a grammar is text, not {type(grammar).__name__}")
        self._end = tokenizer.vocab                     # stands for "the text may end here"
        self._matcher = llguidance.LLMatcher(_vocabulary(tokenizer, llguidance), source, log_level=0)
        self._check("this schema cannot be used" if grammar is None else "this grammar cannot be used")
        self.ended = False

    def allowed(self, ends: frozenset[int]) -> npt.NDArray[np.bool_]:
        """Which ids may come next: bool (vocab,). Those of `ends` may where the text may end."""
        mask = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) > 0
        self._check("the grammar stopped")
        allowed = mask[:self._end].copy()
        allowed[list(ends)] = mask[self._end]
        return allowed

    def accept(self, token: int) -> None:
        """The text goes on with a token that was allowed."""
        self._matcher.consume_token(token)
        self._check("the grammar stopped")
        self.ended = bool(self._matcher.is_stopped())

    def _check(self, what: str) -> None:
        if self._matcher.is_error():
            raise ValueError(f"{what}: {self._matcher.get_error().strip()}")


def _json_grammar(llguidance: Any, schema: object) -> Any:
    if not isinstance(schema, Mapping | str):
        raise TypeError(f"a schema is a dict or JSON text, not {type(schema).__name__}")
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(schema if isinstance(schema, str) else dict(schema),
                                                             defaults=_JSON_DEFAULTS)
    except ValueError as error:
        raise ValueError(f"this schema cannot be used: {error}") from None


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ImportError("a schema or a grammar needs the package llguidance: pip install 'warp_embed[structured]'"
                          ) from error
    return llguidance


def _vocabulary(tokenizer: Tokenizer, llguidance: Any) -> Any:
    """llguidance's own form of a vocabulary, made once. Ids without text, and special tokens, never match a grammar."""
    with _lock:
        known = _vocabularies.get(tokenizer)
        if known is None:
            source = llguidance.TokenizerWrapper(_Vocabulary(tokenizer))
            start = time.perf_counter()
            known = _vocabularies[tokenizer] = llguidance.LLTokenizer(source, slices=[])
            log.debug("llguidance read a vocabulary of %d in %.0f ms", tokenizer.vocab,
                      (time.perf_counter() - start) * 1e3)
        return known


class _Vocabulary:
    """What llguidance asks a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        silent = set(tokenizer.special.values())
        self.tokens: list[bytes] = []
        for token in range(tokenizer.vocab):
            text = tokenizer.token_bytes(token)
            if not text:
                silent.add(token)
            self.tokens.append(text or b"<reserved %d>" % token)
        self.eos_token_id = tokenizer.vocab
        self.tokens.append(b"<end of the text>")
        self.special_token_ids = sorted(silent | {self.eos_token_id})
        # Only asked for the fixed text of a grammar; any split into tokens will do there.
        self._encode = {bytes([byte]): byte for byte in range(256)}
        self._encode |= {text: token for token, text in enumerate(self.tokens) if len(text) == 1}

    def __call__(self, text: str | bytes) -> list[int]:
        raw = text.encode() if isinstance(text, str) else text
        return [self._encode[bytes([byte])] for byte in raw]
