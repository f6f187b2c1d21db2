"""Pages as tests read them."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "img", "source", "br"}


class Page(HTMLParser):
    """Checks that tags are balanced; collects text, addresses and alternative texts."""

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.links, self.alts, self.tags = [], [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        values = dict(attributes)
        self.links += [values[name] for name in ("src", "href", "srcset") if name in values]
        if tag == "img":
            self.alts.append(values["alt"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())
