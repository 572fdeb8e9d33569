"""A made-up session that says what a script tells it to, and the model that makes it."""
from types import SimpleNamespace

from vocabulary import SPECIALS, VOCAB

from warp_embed.errors import Cancelled, ContextFull
from warp_embed.runtime.chatformat import KIMI_LINEAR
from warp_embed.runtime.generation import GREEDY
from warp_embed.runtime.tokenizer import TextStream, Tokenizer

END = SPECIALS["<|im_end|>"]


class Session:
    """Replies follow the script: ids, or exceptions to raise. `trouble` is raised after so many prompt tokens.

    `kept` are the positions that it can go back to; `read` counts what it evaluated beside replies.
    """

    def __init__(self, model, context=1000):
        self.model, self.context, self.tokens, self.script, self.trouble = model, context, [], [], None
        self.read, self.kept, self.seed, self.seeds = 0, {0}, 7, []

    @property
    def position(self):
        return len(self.tokens)

    def sync(self, ids, on_progress=None):
        assert ids and all(0 <= i < VOCAB for i in ids)
        if len(ids) > self.context:
            raise ContextFull("full", position=self.position)
        shorter = min(len(ids), self.position)
        common = next((i for i in range(shorter) if ids[i] != self.tokens[i]), shorter)
        at = common if common == self.position else max(p for p in self.kept if p <= common)
        self.kept = {p for p in self.kept if p <= common}
        rest = ids[at:]
        self.tokens = self.tokens[:at]
        if self.trouble is not None and rest:
            (n, error), self.trouble = self.trouble, None
            self.tokens += rest[:n]
            raise error
        self.read += len(rest)
        self.tokens += rest
        self.checkpoint()

    def checkpoint(self):
        self.kept.add(self.position)

    def _ready(self):
        pass

    def _reading(self, ids, clock):
        while self.tokens[:len(ids)] != ids:
            common = next((i for i, (a, b) in enumerate(zip(ids, self.tokens, strict=False)) if a != b),
                          min(len(ids), self.position))
            self.sync(ids[:common + 1])
            yield

    def _decode(self, how):
        if how.sampling is not GREEDY:
            self.seeds.append(how.sampling.seed)
        else:
            self.seeds.append(None)
        return self.speak(how)

    def speak(self, how):
        stream, reason = TextStream(self.model.tokenizer), None
        while reason is None:
            if self.position == self.context:
                raise ContextFull("full")
            item, text, how.left = self.script.pop(0), "", how.left - 1
            if how.clock is not None:
                yield None
            if isinstance(item, Cancelled):
                reason = "cancelled"
            elif isinstance(item, BaseException):
                raise item
            elif item in how.stop_ids:
                reason = "stop"
            else:
                self.tokens.append(item)
                text = stream.push(item)
                reason = "length" if how.left == 0 else "context" if self.position == self.context else None
            if reason:
                text += stream.flush()
            yield SimpleNamespace(id=item, text=text, finish_reason=reason)


class Model:
    def __init__(self, path, context=1000):
        self.path, self.tokenizer, self.context = str(path), Tokenizer(path, VOCAB), context
        self.end = self.tokenizer.special.get("<|end_of_msg|>", END)
        self.config = SimpleNamespace(eos_token_id=self.end, vocab=VOCAB)

    def session(self):
        return Session(self, self.context)


def transcript(tok, *turns, form=KIMI_LINEAR):
    """Ids of turns encoded segment by segment."""
    ids = []
    for role, content in turns:
        prefix, suffix = (form["open"], form["assistant"][1]) if role == "assistant" else form[role]
        ids += tok.encode_markup(prefix) + tok.encode(content) + tok.encode_markup(suffix)
    return ids


def says(chat, text, *end):
    chat.session.script += [*chat.session.model.tokenizer.encode(text), *(end or [chat.session.model.end])]
