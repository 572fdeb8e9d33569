"""A program with a language model inside: ask one question, show the answer as it comes, tell what it took.

    python examples/embed.py [QUESTION]
"""
import sys

import warp_embed

question = sys.argv[1] if len(sys.argv) > 1 else "What is the capital of France?"

with warp_embed.Model.open(warp_embed.demo_path(), context=512) as model:
    chat = model.chat()
    for text in chat.ask(question, max_tokens=64):
        print(text, end="", flush=True)
    stats = model.stats()
    print(f"\n{stats.tokens} tokens, {stats.hits} experts found in the cache, {stats.misses} read from disk")
