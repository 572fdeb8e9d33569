"""A model that takes text: kl-tiny with a larger vocabulary. What it says is gibberish, always the same."""
import json
import struct
from pathlib import Path

import numpy as np
from vocabulary import SPECIALS, VOCAB, rank_lines

KL_TINY = Path(__file__).parents[1] / "data" / "kl-tiny"


def widen(blob, rows):
    """A safetensors file whose embedding and unembedding have so many rows, the new ones made of old ones."""
    (size,) = struct.unpack_from("<Q", blob)
    header, body = json.loads(blob[8:8 + size]), blob[8 + size:]
    out, offset = [], 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        data = body[begin:end]
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            assert entry["dtype"] == "BF16"
            old = np.frombuffer(data, np.uint16).reshape(entry["shape"])
            data = np.concatenate((old, old[:rows - len(old), ::-1])).tobytes()
            entry["shape"][0] = rows
        entry["data_offsets"] = [offset, offset + len(data)]
        offset += len(data)
        out.append(data)
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + b"".join(out)


def write_checkpoint(folder, specials=SPECIALS):
    (folder / "model.safetensors").write_bytes(widen((KL_TINY / "model.safetensors").read_bytes(), VOCAB))
    config = json.loads((KL_TINY / "config.json").read_text())
    config.update(vocab_size=VOCAB, eos_token_id=specials.get("<|im_end|>", specials.get("<|end_of_msg|>")))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tiktoken.model").write_bytes(b"\n".join(rank_lines()) + b"\n")
    added = {str(i): {"content": text, "special": True} for text, i in specials.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return folder
