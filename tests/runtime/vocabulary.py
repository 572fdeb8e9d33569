"""A small vocabulary for tests: 256 bytes, some merges, some specials, reserved ids."""
import base64
import json

MERGES = [b"th", b"the", b" t", b" the", b"in", b"ing", b"<|", b"|>", b"im", b"im_", b"end", b"Hel", b"He", b"llo",
          b"ll", b"Hello", b" w", b"wor", b"or", b"  ", b"    ", b"12", b"123", b"__", b"____", b"--", b"----", b"aa",
          b"aaaa", "é".encode(), "中".encode(), "文".encode(), "中文".encode(), "नम".encode(), b'">',
          b"='", b"'s", b"\n\n"]
SPECIALS = {"[BOS]": 300, "[EOS]": 301, "<|im_end|>": 302, "<|im_user|>": 303, "<|im_assistant|>": 304,
            "<|im_middle|>": 306, "<|im_end|>x": 307, "<|sep|>": 308,
            "<|im_system|>": 309, "[PAD]": 319}
# K3's, and one of Kimi-Linear's that it does not have: the same ids mean other things in other models.
XTML_SPECIALS = {"[BOS]": 300, "[EOS]": 301, "<|end_of_msg|>": 302, "<|open|>": 303, "<|close|>": 304, "<|sep|>": 305,
                 "<|media_begin|>": 308, "<|media_content|>": 309, "<|media_end|>": 310, "<|media_pad|>": 311,
                 "[PAD]": 319}
VOCAB = 320
TOKENS = {bytes([i]): i for i in range(256)} | {m: 256 + i for i, m in enumerate(dict.fromkeys(MERGES))}


def rank_lines(tokens=TOKENS):
    return [base64.b64encode(t) + b" %d" % r for t, r in tokens.items()]


def write(folder, lines=None, specials=SPECIALS, name="tokenizer.model"):
    (folder / name).write_bytes(b"\n".join(rank_lines() if lines is None else lines) + b"\n")
    if specials is not None:
        entries = [{"id": i, "text": t} for t, i in specials.items()] if isinstance(specials, dict) else specials
        (folder / "specials.json").write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return folder
