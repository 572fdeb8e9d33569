#!/usr/bin/env python3
"""Train the demo model.

    python3.11 -m venv venv && venv/bin/pip install torch==2.13.0 transformers==5.23.0 safetensors numpy tiktoken
    venv/bin/python tools/demo/tokenizer.py tools/demo/checkpoint       # the tokenizer, only if the corpus changed
    venv/bin/python tools/demo/train.py --run RUN                       # resumes when RUN holds a state
    venv/bin/python tools/demo/export.py --run RUN                      # tools/demo/checkpoint and the test data

RUN is a directory outside of the repository: it gets `state.pt` (weights, optimiser and position, rewritten every
`--save` steps) and `log.txt` (loss, speed, and the share of held-out questions answered exactly right, by kind, with
teacher forcing). A run continues from its state; with a larger ``--steps`` it continues a finished run. Everything is
drawn from ``--seed``, so a run that is interrupted sees the data of one that is not, up to the pool of conversations
it was in.

The shipped weights are of one run whose schedule was drawn in while it ran; these commands repeat it (the products of
the first part were still in float32), and took 2,790 seconds of training on 2 cores shared with other work:

    train.py --run RUN --no-bf16 --steps 10000 --stop 1200 && train.py --run RUN --steps 5000 --stop 1400 &&
    train.py --run RUN --steps 4500 --stop 2200 && train.py --run RUN --steps 3800 --stop 2600 &&
    train.py --run RUN --steps 2900

To continue, give a larger ``--steps``: the rate follows the longer schedule from there.

The loss is taken on what the assistant says. Rows are padded at the right to a multiple of 16 and never packed, so
every row starts from an empty state and needs no mask. The routing bias of an expert moves a small step against its
load after every update.
"""
from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as fn

sys.path.insert(0, str(Path(__file__).resolve().parent))
import corpus  # noqa: E402
import model as demo  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
POOL = 2048                 # conversations drawn at once, sorted by length, cut into batches


def pack(rows: list[tuple[list[int], list[bool]]], pad: int) -> Batch:
    """ids [B, T], targets [B, T] (next token where the assistant speaks, else -100), real [B, T]."""
    width = -(-max(len(ids) for ids, _ in rows) // demo.CHUNK) * demo.CHUNK
    ids = torch.full((len(rows), width), pad)
    targets = torch.full((len(rows), width), -100)
    real = torch.zeros(len(rows), width, dtype=torch.bool)
    for r, (row, learn) in enumerate(rows):
        t = torch.tensor(row)
        ids[r, :len(row)], real[r, :len(row)] = t, True
        targets[r, :len(row) - 1] = torch.where(torch.tensor(learn[1:]), t[1:], -100)
    return ids, targets, real


def pool(tok: Tokenizer, seed: int, number: int, tokens: int) -> list[Batch]:
    """The batches of one pool: `tokens` ids at most in each, rows of similar length together."""
    source = corpus.training(seed * 1_000_003 + number)
    rows = sorted((tok.chat(next(source)) for _ in range(POOL)), key=lambda r: len(r[0]))
    rows = [r for r in rows if len(r[0]) <= 256]
    batches, start = [], 0
    while start < len(rows):
        end = start + 1
        while end < len(rows) and (end + 1 - start) * (len(rows[end][0]) + demo.CHUNK) <= tokens:
            end += 1
        batches.append(pack(rows[start:end], demo.release_config()["pad_token_id"]))
        start = end
    random.Random(number).shuffle(batches)
    return batches


def stream(tok: Tokenizer, seed: int, first: int, tokens: int) -> Iterator[tuple[int, Batch]]:
    number = first
    while True:
        for batch in pool(tok, seed, number, tokens):
            yield number, batch
        number += 1


class Balance:
    """Counts the real tokens of each expert and moves the routing bias against the load."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        self.real: torch.Tensor | None = None
        self.load = [torch.zeros(g.num_experts) for g in self.gates]
        self.shown = [torch.zeros(g.num_experts) for g in self.gates]
        for i, gate in enumerate(self.gates):
            gate.register_forward_hook(lambda _m, _a, out, i=i: self._count(i, out[2]))

    def _count(self, i: int, chosen: torch.Tensor) -> None:
        if self.real is not None:
            self.load[i] += chosen[self.real.reshape(-1)].flatten().bincount(minlength=len(self.load[i]))

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for i, gate in enumerate(self.gates):
            load, bias = self.load[i], gate.e_score_correction_bias
            bias += rate * (load.mean() - load).sign()
            bias -= bias.mean()
            self.shown[i] = 0.98 * self.shown[i] + 0.02 * load / load.sum()
            load.zero_()

    def least(self) -> float:
        """Smallest running share of an expert, in units of the even share."""
        return min((s / s.sum() * len(s)).min().item() for s in self.shown)


@torch.no_grad()
def evaluate(model: torch.nn.Module, tok: Tokenizer, questions: list[dict]) -> dict[str, tuple[int, int]]:
    """Exact answers by kind with teacher forcing: right iff every token up to <|im_end|> is the most likely one."""
    scores: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    rows = []
    for q in questions:
        prompt, _ = tok.chat(q["messages"], generate=True)
        both, _ = tok.chat([*q["messages"], {"role": "assistant", "content": q["answer"]}])
        rows.append((q["kind"], both, [False] * len(prompt) + [True] * (len(both) - len(prompt))))
    rows.sort(key=lambda r: len(r[1]))
    for start in range(0, len(rows), 64):
        part = rows[start:start + 64]
        ids, targets, _ = pack([(ids, learn) for _, ids, learn in part], demo.release_config()["pad_token_id"])
        with demo.fast_training():
            best = model(ids, use_cache=False).logits.argmax(-1)
        right = ((best == targets) | (targets == -100)).all(1).tolist()
        for (kind, _, _), ok in zip(part, right, strict=True):
            scores[kind][0] += ok
            scores[kind][1] += 1
    return {k: (a, n) for k, (a, n) in scores.items()}


def report(scores: dict[str, tuple[int, int]]) -> str:
    right, asked = (sum(s[i] for s in scores.values()) for i in (0, 1))
    parts = " ".join(f"{k.replace(' ', '_')}={100 * a / n:.0f}" for k, (a, n) in scores.items())
    return f"held-out {100 * right / asked:.1f}% | {parts}"


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine to a fiftieth of the peak."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = min(1.0, (step - args.warmup) / max(1, args.steps - args.warmup))
    return args.lr * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def spare_threads(now: int) -> int:
    """2 threads on a quiet machine, 1 on a busy one, where waiting for each other costs more than it gains."""
    try:
        runnable = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    except OSError:
        return now
    return 2 if runnable <= 2 else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="directory of the state and the log")
    parser.add_argument("--tokenizer", type=Path, default=Path(__file__).resolve().parent / "checkpoint")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=3072, help="ids per step, padding included")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=150)
    parser.add_argument("--balance", type=float, default=1e-3, help="step of the routing bias")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="2: one of the two is given up when others compute")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True,
                        help="matrix products in bfloat16 (weights, recurrence, norms and loss stay float32)")
    parser.add_argument("--save", type=int, default=200)
    parser.add_argument("--stop", type=int, help="stop after this step, schedule unchanged")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    args.run.mkdir(parents=True, exist_ok=True)
    log_file = (args.run / "log.txt").open("a", encoding="utf-8")

    def log(text: str) -> None:
        print(text, flush=True)
        log_file.write(text + "\n")
        log_file.flush()

    config = demo.release_config()
    worst = demo.check_fast_form(config)
    log(f"fast form against the original: loss {worst[0]:.1e}, worst gradient {worst[1]:.1e}")
    tok = Tokenizer(args.tokenizer)
    questions = corpus.all_held_out()
    model = demo.build(config, args.seed)
    matrices = [p for n, p in model.named_parameters() if p.ndim > 1 and "A_log" not in n and "conv1d" not in n]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    opt = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
                            lr=args.lr, betas=(0.9, 0.98), fused=True)
    step, number, spent, seen = 0, 0, 0.0, 0
    path = args.run / "state.pt"
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["optimiser"])
        step, number, spent, seen = state["step"], state["pool"] + 1, state["seconds"], state["tokens"]
    log(f"{sum(p.numel() for p in model.parameters())} parameters, from step {step} of {args.steps}")

    def save(pool_number: int) -> None:
        part = path.with_suffix(".part")
        torch.save({"model": model.state_dict(), "optimiser": opt.state_dict(), "step": step, "pool": pool_number,
                    "seconds": spent, "tokens": seen}, part)
        part.replace(path)

    balance = Balance(model)
    threads = args.threads
    loss_sum, clock, seen_then = 0.0, time.perf_counter(), seen
    batches = stream(tok, args.seed, number, args.tokens)
    while step < min(args.steps, args.stop or args.steps):
        number, (ids, targets, real) = next(batches)
        for group in opt.param_groups:
            group["lr"] = learning_rate(step, args)
        balance.real = real
        with demo.fast_training(), torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            hidden = model.model(ids, use_cache=False).last_hidden_state
            wanted = targets >= 0
            loss = fn.cross_entropy(model.lm_head(hidden[wanted]).float(), targets[wanted])
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        balance.step(args.balance * (1.0 if step < 0.8 * args.steps else 0.1))
        balance.real = None
        step += 1
        if args.threads == 2 and step % 10 == 0:
            torch.set_num_threads(threads := spare_threads(threads))
        seen += int(real.sum())
        loss_sum += loss.item()
        if step % 50 == 0:
            elapsed = time.perf_counter() - clock
            spent += elapsed
            log(f"step {step} loss {loss_sum / 50:.4f} lr {learning_rate(step, args):.2e} "
                f"tokens/s {(seen - seen_then) / elapsed:.0f} seconds {spent:.0f} tokens {seen} "
                f"least expert {balance.least():.2f}")
            loss_sum, clock, seen_then = 0.0, time.perf_counter(), seen
        if step % args.save == 0:
            save(number)
            log(f"step {step} {report(evaluate(model, tok, questions))}")
            spent += time.perf_counter() - clock
            clock = time.perf_counter()
    save(number)
    log(f"end at step {step}: {report(evaluate(model, tok, questions))}")


if __name__ == "__main__":
    main()
