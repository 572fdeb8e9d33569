"""A made-up session that says what a script tells it to, and the model that makes it."""
from types import SimpleNamespace

from vocabulary import SPECIALS, VOCAB

from warp_embed.errors import Cancelled, ContextFull
from warp_embed.runtime.chatformat import KIMI_LINEAR
from warp_embed.runtime.tokenizer import StopFilter, TextStream, Tokenizer

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

    def sync(self, ids):
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

    def generate(self, *, max_tokens, sampling, stop, stop_ids, top_logprobs=0, schema=None, grammar=None):
        if max_tokens < 1:
            raise ValueError("nothing to do")
        self.seeds.append(sampling.seed if sampling else None)
        return self.speak(max_tokens, StopFilter(stop), {*stop_ids, self.model.config.eos_token_id})

    def speak(self, left, text_filter, stop_ids):
        stream, reason = TextStream(self.model.tokenizer), None
        while reason is None:
            if self.position == self.context:
                raise ContextFull("full")
            item, text, left = self.script.pop(0), "", left - 1
            if isinstance(item, Cancelled):
                reason = "cancelled"
            elif isinstance(item, BaseException):
                raise item
            elif item in stop_ids:
                reason = "stop"
            else:
                self.tokens.append(item)
                text = text_filter.push(stream.push(item))
                reason = ("stop" if text_filter.stopped else "length" if left == 0 else
                          "context" if self.position == self.context else None)
            if reason:
                text += text_filter.push(stream.flush()) + text_filter.flush()
            yield SimpleNamespace(id=item, text=text, finish_reason=reason)


class Model:
    def __init__(self, path, context=1000):
        self.path, self.tokenizer, self.context = str(path), Tokenizer(path, VOCAB), context
        self.config = SimpleNamespace(eos_token_id=END)

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
    chat.session.script += [*chat._said.tokenizer.encode(text), *(end or [END])]
