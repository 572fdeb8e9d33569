#!/usr/bin/env python3
"""Train the demo's byte-pair tokenizer and load it.

    python tools/demo/tokenizer.py DIRECTORY        # writes tiktoken.model and tokenizer_config.json

`tiktoken.model` has one line ``BASE64 RANK`` per ordinary token: the 256 bytes, then the merges in the order in which
they were learnt, so every merge joins two tokens of lower rank, which is what tiktoken needs. Pieces with a digit are
left out of the training: numbers are spelt digit by digit. The specials follow the ordinary tokens.
"""
from __future__ import annotations

import base64
import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import corpus  # noqa: E402

_U, _L = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_S = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PATTERN = "|".join((
    r"[\p{Han}]+", rf"[^\r\n\p{{L}}\p{{N}}]?{_U}*{_L}+{_S}?", rf"[^\r\n\p{{L}}\p{{N}}]?{_U}+{_L}*{_S}?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"))
ORDINARY = 1008
VOCAB = 1024                # the rest is specials and reserved ids
SPECIALS = ("[BOS]", "[EOS]", corpus.IM_END, corpus.IM_USER, corpus.IM_ASSISTANT, corpus.IM_SYSTEM, corpus.IM_MIDDLE)
SPECIAL_IDS = {text: ORDINARY + i for i, text in enumerate(SPECIALS)} | {"[PAD]": VOCAB - 1}


def pieces(conversations: int = 30000, seed: int = 12345) -> Counter[bytes]:
    """Pre-tokenised pieces of a sample of the corpus with their counts; role names count once each."""
    import regex

    pattern = regex.compile(PATTERN, regex.V1)
    count: Counter[str] = Counter()
    source = corpus.training(seed)
    for _ in range(conversations):
        for m in next(source):
            count.update(pattern.findall(m["content"]))
    count.update({role: 1000 for role in ("user", "assistant", "system")})
    return Counter({p.encode(): n for p, n in count.items() if not any(c.isnumeric() for c in p)})


def train(counts: Counter[bytes], size: int) -> list[bytes]:
    """Greedy byte-pair merges; ties go to the pair that is smaller as bytes."""
    tokens = [bytes([i]) for i in range(256)]
    words = [([bytes([b]) for b in p], n) for p, n in sorted(counts.items())]
    known = set(tokens)
    while len(tokens) < size:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, n in words:
            for pair in zip(word, word[1:], strict=False):
                pairs[pair] += n
        best = max(pairs, key=lambda p: (pairs[p], p))
        merged = best[0] + best[1]
        for word, _ in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == best:
                    word[i:i + 2] = [merged]
                i += 1
        if merged not in known:
            known.add(merged)
            tokens.append(merged)
    return tokens


def write(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tokens = train(pieces(), ORDINARY)
    lines = (f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens))
    (directory / "tiktoken.model").write_text("".join(lines), encoding="ascii")
    added = {str(i): {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                      "special": True} for text, i in SPECIAL_IDS.items()}
    config = {"added_tokens_decoder": added, "additional_special_tokens": list(SPECIALS[2:]), "bos_token": "[BOS]",
              "clean_up_tokenization_spaces": False, "eos_token": corpus.IM_END, "model_max_length": 4096,
              "pad_token": "[PAD]", "tokenizer_class": "TikTokenTokenizer"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class Tokenizer:
    """The tokenizer of a checkpoint directory, by way of tiktoken."""

    def __init__(self, directory: Path) -> None:
        import tiktoken

        ranks = {}
        for line in (directory / "tiktoken.model").read_text(encoding="ascii").splitlines():
            text, rank = line.split(" ")
            ranks[base64.b64decode(text)] = int(rank)
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
        self.specials = {v["content"]: int(k) for k, v in config["added_tokens_decoder"].items()}
        self.encoding = tiktoken.Encoding("demo", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self.specials)

    def chat(self, messages: list[corpus.Message], generate: bool = False) -> tuple[list[int], list[bool]]:
        """Ids of a conversation, and which of them the assistant has to produce."""
        ids: list[int] = []
        learn: list[bool] = []
        for sort, text, mine in corpus.segments(messages, generate):
            if sort == "markup":
                part = self.encoding.encode(text, allowed_special="all")
            else:
                part = self.encoding.encode(text, allowed_special=set(), disallowed_special=())
            ids += part
            learn += [mine] * len(part)
        return ids, learn

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode(ids)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
