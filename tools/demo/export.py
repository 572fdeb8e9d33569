#!/usr/bin/env python3
"""Write the demo checkpoint in the release's form, check it in unpatched transformers, and write the test data.

    venv/bin/python tools/demo/export.py --run RUN [--questions 0]

Writes `tools/demo/checkpoint/` (config.json and model.safetensors; the tokenizer is already there), the held-out
questions `tests/data/demo_questions.json` and the golden `tests/data/demo_golden.npz`:

    input_ids   [T]  int32      a chat of two exchanges, ending with the generation prompt of a third
    logits      [T, vocab] f32  transformers' logits after every one of them, eager attention, float32
    gen_ids     [n]  int32      its greedy continuation, up to and with <|im_end|>
    gen_logits  [n, vocab] f32  what each was chosen from

Then it answers the held-out questions by greedy generation with transformers and prints the exact answers by kind.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))
import corpus  # noqa: E402
import model as demo  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402

HERE = Path(__file__).resolve().parent
GOLDEN = [
    {"role": "user", "content": "My name is Anna."},
    {"role": "assistant", "content": "Nice to meet you, Anna."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
    {"role": "user", "content": "What is my name?"},
]


def write_checkpoint(run: Path, directory: Path) -> None:
    """Round the trained weights, save them, load them back without any change to transformers and compare logits."""
    config = demo.release_config()
    model = demo.build(config, seed=0).eval()
    model.load_state_dict(torch.load(run / "state.pt", weights_only=True)["model"])
    demo.round_to_bf16(model)
    tensors = {name: t if name.endswith(demo.F32_NAMES) else t.to(torch.bfloat16)
               for name, t in demo.to_release(model.state_dict(), config).items()}
    save_file({k: tensors[k] for k in sorted(tensors)}, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    ids = torch.tensor([(Tokenizer(directory).chat(GOLDEN)[0] * 2)[:64]])
    with torch.no_grad():
        loaded = load(directory)(ids, use_cache=False).logits
        assert torch.equal(loaded, model(ids, use_cache=False).logits), "the file holds another model"
        with demo.fast_training():
            print("largest difference of a logit, training form and unpatched transformers:",
                  (model(ids, use_cache=False).logits - loaded).abs().max().item())


def load(directory: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def greedy(model: torch.nn.Module, ids: list[int], end: int, limit: int = 48) -> tuple[list[int], np.ndarray]:
    """Greedy continuation with the cache, and the logits behind it."""
    out = model(torch.tensor([ids]), use_cache=True)
    answer: list[int] = []
    rows = []
    while len(answer) < limit:
        row = out.logits[0, -1]
        rows.append(row.numpy())
        answer.append(int(row.argmax()))
        if answer[-1] == end:
            break
        out = model(torch.tensor([[answer[-1]]]), past_key_values=out.past_key_values, use_cache=True)
    return answer, np.stack(rows)


def write_golden(model: torch.nn.Module, tok: Tokenizer, path: Path) -> None:
    ids, _ = tok.chat(GOLDEN, generate=True)
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    answer, rows = greedy(model, ids, tok.specials[corpus.IM_END])
    print(f"golden: {len(ids)} ids, continued by {tok.decode(answer)!r}")
    np.savez_compressed(path, input_ids=np.array(ids, np.int32), logits=logits, gen_ids=np.array(answer, np.int32),
                        gen_logits=rows)


def answer_questions(model: torch.nn.Module, tok: Tokenizer, questions: list[dict]) -> None:
    end = tok.specials[corpus.IM_END]
    scores: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for q in questions:
        ids, _ = tok.chat(q["messages"], generate=True)
        answer, _ = greedy(model, ids, end)
        text = tok.decode(answer[:-1]) if answer[-1] == end else tok.decode(answer)
        scores[q["kind"]][0] += text == q["answer"]
        scores[q["kind"]][1] += 1
        if text != q["answer"]:
            print(f"  wrong: {q['messages'][-1]['content']!r} -> {text!r}, not {q['answer']!r}")
    for kind, (right, asked) in scores.items():
        print(f"{kind:16} {right:4} of {asked:4}  {100 * right / asked:5.1f} %")
    right, asked = (sum(s[i] for s in scores.values()) for i in (0, 1))
    print(f"{'all':16} {right:4} of {asked:4}  {100 * right / asked:5.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, default=HERE / "checkpoint")
    parser.add_argument("--data", type=Path, default=HERE.parent.parent / "tests" / "data")
    parser.add_argument("--questions", type=int, help="answer only the first so many held-out questions")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    write_checkpoint(args.run, args.checkpoint)
    tok = Tokenizer(args.checkpoint)
    model = load(args.checkpoint)
    args.data.mkdir(parents=True, exist_ok=True)
    write_golden(model, tok, args.data / "demo_golden.npz")
    questions = corpus.all_held_out()
    rows = ",\n".join(json.dumps(q, ensure_ascii=False) for q in questions)
    (args.data / "demo_questions.json").write_text(f"[\n{rows}\n]\n", encoding="utf-8")
    answer_questions(model, tok, questions[:args.questions])
    for path in sorted([*args.checkpoint.iterdir(), *args.data.glob("demo_*")]):
        print(f"{path.stat().st_size:9} {path.name}")


if __name__ == "__main__":
    main()
