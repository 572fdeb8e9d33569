"""An assistant in the terminal that works offline and remembers the conversation from one day to the next.

    python examples/assistant.py [MODEL] [--state FILE] [--memory SIZE]

Ctrl-C ends a reply. /retry answers again, /edit TEXT asks the last question differently, /forget starts anew,
/help lists these, Ctrl-D leaves; the conversation is kept and goes on next time.
"""
import argparse
import sys
from pathlib import Path

import platformdirs

import warp_embed
from warp_embed import Chat, Model, Sampling, StateError, WarpError

HELP = """/retry       answer the last question again
/edit TEXT   ask it differently
/forget      start a new conversation
/quit        leave, as Ctrl-D does; the conversation goes on next time"""
SYSTEM = None               # for a larger model: "You are a helpful assistant.", for example
LIVELY = Sampling(temperature=0.7, top_p=0.95)


def colour(code, text):
    return f"\x1b[{code}m{text}\x1b[0m" if sys.stdout.isatty() else text


def dim(text):
    return colour("2", text)


def printable(text):
    """A model may write control sequences, and a terminal would obey them."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def open_chat(model, state):
    """The conversation of last time, or a new one if there is none that fits this model."""
    try:
        return Chat.restore(model, state)
    except FileNotFoundError:
        pass
    except (StateError, warp_embed.ContextFull) as error:
        print(dim(f"  The last conversation cannot go on ({error}).\n"))
    return model.chat(system=SYSTEM)


def show(pieces):
    """Print a reply as it comes; Ctrl-C ends it, and what was said stays said."""
    sys.stdout.write(colour("35", "  ◆ "))
    try:
        for piece in pieces:
            sys.stdout.write(printable(piece).replace("\n", "\n    "))
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.write(dim(" … stopped"))
    print()


def cost(chat):
    """One line about the last reply: speed, and how full the context is."""
    seconds = sum(token.stats.total_ms for token in chat.reply) / 1000
    speed = f"{len(chat.reply) / seconds:.0f} tokens/s · " if seconds else ""
    return dim(f"    {speed}{chat.session.position} of {chat.session.context} tokens\n")


def answer(chat, line):
    """One turn. A command that starts anew gives the chat to go on with."""
    command, _, rest = line.partition(" ")
    options = {"max_tokens": 400, "overflow": "drop_oldest"}
    if command == "/help":
        print(dim("    " + HELP.replace("\n", "\n    ") + "\n"))
        return chat
    if command == "/forget":
        model = chat.session.model
        chat.close()
        print(dim("    Forgotten.\n"))
        return model.chat(system=SYSTEM)
    if command == "/retry":
        show(chat.retry(sampling=LIVELY, **options))
    elif command == "/edit" and rest.strip():
        questions = [i for i, message in enumerate(chat.messages) if message["role"] == "user"]
        if not questions:
            raise ValueError("nothing was asked yet")
        show(chat.edit(questions[-1], rest.strip(), **options))
    elif command.startswith("/"):
        raise ValueError(f"there is no {command} like that; /help says what there is")
    else:
        show(chat.ask(line, **options))
    print(cost(chat))
    return chat


def lines():
    """What the user types, until Ctrl-D or /quit. Ctrl-C at an empty prompt leaves, too."""
    prompt = "\x01\x1b[1;36m\x02you › \x01\x1b[0m\x02" if sys.stdin.isatty() else ""     # 1 and 2: what has no width
    if "readline" not in sys.modules:
        prompt = prompt.replace("\x01", "").replace("\x02", "")
    while True:
        try:
            line = input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line == "/quit":
            return
        if line:
            yield line


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=warp_embed.demo_path(), help="default: the demo model")
    parser.add_argument("--state", type=Path, help="where the conversation is kept")
    parser.add_argument("--memory", default="auto", help='ceiling, such as "24GB" (default: what is free)')
    args = parser.parse_args()
    state = args.state or Path(platformdirs.user_data_dir("warp_embed_examples"), "assistant.chat")
    state.parent.mkdir(parents=True, exist_ok=True)
    try:
        import readline  # noqa: F401  (arrow keys and history at the prompt)
    except ImportError:
        pass
    try:
        model = Model.open(args.model, memory=args.memory, context=2048)
    except (WarpError, OSError) as error:
        sys.exit(f"assistant: {error}")
    with model:
        print(f"\n  {colour('1', 'Assistant')}  "
              + dim(f"{Path(model.path).stem} · {model.memory()['total'] / 1e6:.0f} MB · offline · /help"))
        chat = open_chat(model, state)
        turns = sum(message["role"] == "user" for message in chat.messages)
        print(dim(f"  Welcome back: {turns} question{'s' * (turns != 1)} so far.\n" if turns else "  Ask something.\n"))
        for line in lines():
            try:
                chat = answer(chat, line)
            except (WarpError, ValueError, OSError) as error:
                print(colour("31", f"    {error}\n"))
        if chat.messages:
            chat.save(state)
            print(dim(f"  Kept for next time: {state}"))
        else:
            state.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
