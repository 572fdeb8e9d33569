"""An agent: works through steps, tries each in several branches of the conversation, and goes on from the best one.

    python examples/agent.py [STEP ...] [--model MODEL] [--branches N]

A branch is a fork of the conversation: it shares everything said so far and costs only its own words. Each branch
answers with other random numbers; the most convincing answer is the one that most branches agree on, then the one that
the model found most probable. If the branches are not sure, the tools are asked: functions that know for certain what a
model can only guess. In a step, {answer} is the last word of the answer before.
"""
import argparse
import datetime
import math
import operator
import re
import sys
from collections import Counter
from dataclasses import dataclass

import warp_embed
from warp_embed import BudgetError, Chat, Model, Sampling, WarpError

STEPS = ("Hello, my name is Ada.", "What is the capital of Italy?", "How many letters does {answer} have?",
         "What is {answer} plus 7?", "What is {answer} in words?", "What day is today?",
         "What is the day after {answer}?", "What is 1234 times 5678?", "What is my name?")
SURE = 0.8                  # share of the branches that agree
OPERATORS = {"plus": operator.add, "minus": operator.sub, "times": operator.mul}


# ---- tools: a question in, a sentence out, or None if it is not theirs ----

def calculator(question):
    match = re.search(r"(\d+) (plus|minus|times) (\d+)", question)
    if not match:
        return None
    a, word, b = int(match[1]), match[2], int(match[3])
    return f"{a} {word} {b} is {OPERATORS[word](a, b)}."


def letter_counter(question):
    match = re.search(r"letters (?:does|has|in) (\w+)", question)
    return match and f"The number of letters in {match[1]} is {len(match[1])}."


def calendar(question):
    return f"Today is {datetime.date.today():%A}." if re.search(r"\btoday\b", question) else None


TOOLS = (calculator, letter_counter, calendar)


# ---- branches ----

@dataclass
class Branch:
    """One way to go on."""

    chat: Chat
    text: str
    probability: float      # of a token, on average


def explore(chat, question, n):
    """Answer a question in n branches, or in as many as memory has room for."""
    branches = []
    for seed in range(n):
        try:
            twin = chat.fork()
        except BudgetError:
            break
        text = "".join(twin.ask(question, max_tokens=60, sampling=Sampling(temperature=1.0, seed=seed))).strip()
        logprobs = [token.logprob for token in twin.reply]
        branches.append(Branch(twin, text, math.exp(sum(logprobs) / max(1, len(logprobs)))))
    return branches


def best(branches):
    """The branch to go on with, and how large a share of the branches says the same."""
    votes = Counter(branch.text for branch in branches)
    winner = max(branches, key=lambda branch: (votes[branch.text], branch.probability))
    return winner, votes[winner.text] / len(branches)


# ---- the loop ----

class Agent:
    """Holds the branch that won so far, and tells what it does."""

    def __init__(self, chat, n_branches):
        self.chat, self.n_branches, self.answer = chat, n_branches, ""

    def step(self, step):
        question = step.replace("{answer}", self.answer)
        print(f"\n{style('1', question)}")
        branches = explore(self.chat, question, self.n_branches)
        if not branches:
            raise BudgetError("no memory is left for a branch", needed_bytes=0, budget_bytes=0)
        winner, share = best(branches)
        sayings = ((tool.__name__, tool(question)) for tool in TOOLS)
        used = next((pair for pair in sayings if pair[1]), None) if share < SURE else None
        self.tell(branches, None if used else winner, share)
        for branch in branches:
            if used or branch is not winner:
                branch.chat.close()
        if used:                # the conversation goes on as if nobody had asked
            print(f"  {style('33', '⚒ ' + used[0].replace('_', ' '))}  {used[1]}")
            text = used[1]
        else:
            self.chat.close()
            self.chat, text = winner.chat, winner.text
        words = re.findall(r"\w+", text)
        self.answer = words[-1] if words else ""
        return text

    def tell(self, branches, winner, share):
        """The branches as a tree, equal ones together."""
        votes = Counter(branch.text for branch in branches)
        for i, (text, n) in enumerate(votes.most_common()):
            sure = max(branch.probability for branch in branches if branch.text == text)
            chosen = winner is not None and winner.text == text
            bar = "●" * n + "○" * (len(branches) - n)
            line = f"{'└' if i == len(votes) - 1 else '├'}─ {bar}  {sure:4.0%}  {' '.join(text.split())}"
            print("  " + (style("32", line + "  ✓") if chosen else style("2", line)))
        if winner is None:
            print(style("2", f"     unsure: at most {share:.0%} agree"))


def style(code, text):
    return f"\x1b[{code}m{text}\x1b[0m" if sys.stdout.isatty() else text


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", nargs="*", default=STEPS, metavar="STEP")
    parser.add_argument("--model", default=warp_embed.demo_path())
    parser.add_argument("--branches", type=int, default=5, metavar="N")
    args = parser.parse_args()
    try:
        with Model.open(args.model, context=1024) as model:
            agent = Agent(model.chat(), max(1, args.branches))
            for step in args.steps:
                agent.step(step)
            print(style("2", f"\n{model.stats()['sessions']} session is left, of {agent.chat.session.position} tokens"))
    except (WarpError, OSError) as error:
        sys.exit(f"agent: {error}")


if __name__ == "__main__":
    main()
