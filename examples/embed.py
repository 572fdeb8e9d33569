"""A program with a language model inside: ask one question, show the answer as it comes, tell what it took.

    python examples/embed.py [QUESTION]
"""
import sys

import warp_embed

question = " ".join(sys.argv[1:]) or "What is the capital of France?"

with warp_embed.Model.open(warp_embed.demo_path(), memory="64MB", context=512) as model:
    chat = model.chat()
    for text in chat.ask(question, max_tokens=64):
        print(text, end="", flush=True)
    session, stats = chat.session, model.stats()
    print(f"\n{session.position} tokens; {stats['hits']} experts found in the cache, {stats['misses']} read from disk")
