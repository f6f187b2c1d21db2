"""Samples of tokens, and what they are built of: BOS, random tokens, words that are one token each."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from hf_linattn.errors import DataError

from ..common.windows import encode

WORDS = 1024
"""Words that are looked for; no task needs more."""
SHORTEST_WORD = 3


@dataclass(frozen=True)
class Candidates:
    """Answers that a reader may choose from, as tokens; it takes the best next token of all of theirs."""

    answers: tuple[tuple[int, ...], ...]
    _following: dict[tuple[int, ...], Tensor] = field(default_factory=dict, compare=False, repr=False)

    def following(self, begun: tuple[int, ...]) -> Tensor:
        """List the candidates' tokens that may come after these, sorted."""
        if begun not in self._following:
            count = len(begun)
            tokens = {a[count] for a in self.answers if len(a) > count and a[:count] == begun}
            self._following[begun] = torch.tensor(sorted(tokens))
        return self._following[begun]

    def chance(self, answer: tuple[int, ...]) -> float:
        """Compute how often random choices, token by token, give this answer."""
        chance = 1.0
        for count in range(len(answer)):
            chance /= len(self.following(answer[:count]))
        return chance


@dataclass(frozen=True)
class Sample:
    """One row to read.

    Attributes:
        ids: [length] tokens, BOS first where there is one.
        answers: (start, end) of every answer; each is right as a whole or not.
        place: index of the first token of what is asked for.
        chance: how often a guesser is right who knows what kind of answer it is.
        candidates: what the answers are chosen from in the easier form of the question, if it has one.
    """

    ids: Tensor
    answers: tuple[tuple[int, int], ...]
    place: int | None
    chance: float
    candidates: Candidates | None = None


class Vocabulary:
    """Pieces of prompts, as tokens of one tokenizer.

    Args:
        tokenizer: a transformers tokenizer.
        size: rows of the model's embedding: tokens from there on cannot be read.
        bos: "yes" begins every prompt with BOS, "no" never, "auto" where the tokenizer does so itself.

    Raises:
        OptionError: BOS is asked for, but the tokenizer has none.
    """

    def __init__(self, tokenizer: Any, size: int, bos: Literal["auto", "yes", "no"] = "auto") -> None:
        self.tokenizer = tokenizer
        self.size = size
        with_bos, without = (encode(tokenizer, ["a"], bos=each).documents[0].ids for each in (bos, "no"))
        self.start: list[int] = with_bos[: len(with_bos) - len(without)].tolist()
        """[BOS] or []."""

    def ids(self, text: str) -> list[int]:
        """Encode a text, without special tokens.

        Raises:
            DataError: the model has no embedding for one of them.
        """
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if ids and max(ids) >= self.size:
            raise DataError(
                f"token {max(ids)} of the tokenizer is none of the model, which has {self.size}: they do not "
                "belong together"
            )
        return ids

    def split(self, before: str, text: str) -> tuple[list[int], list[int]]:
        """Encode `before + text`: the tokens before the first that holds a part of `text`, and the others."""
        short, whole = self.ids(before), self.ids(before + text)
        same = 0
        while same < min(len(short), len(whole)) and short[same] == whole[same]:
            same += 1
        return whole[:same], whole[same:]

    def line(self, text: str) -> list[int]:
        """Encode a line of text, its end included, as it is between other lines."""
        return self.split("\n", text + "\n")[1]

    @cached_property
    def tokens(self) -> list[int]:
        """All tokens but special and added ones, sorted."""
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}
        return sorted(i for i in self.tokenizer.get_vocab().values() if i not in special and i < self.size)

    @cached_property
    def every_token(self) -> Candidates:
        """Each of them as an answer."""
        return Candidates(tuple((token,) for token in self.tokens))

    @cached_property
    def colon(self) -> list[int]:
        """`:` after a word."""
        return self.split("The", ":")[1]

    @cached_property
    def comma(self) -> list[int]:
        """`,` after a word."""
        return self.split("The", ",")[1]

    @cached_property
    def words(self) -> list[int]:
        """Tokens of a blank and lowercase letters that stay whole beside each other, commas and colons."""
        start = self.ids("The")
        text = self._decode(start)
        words = []
        for token in self.tokens:
            piece = self._decode([*start, token])
            word = piece.removeprefix(text + " ")
            plain = word.isascii() and word.isalpha() and word.islower()
            if word == piece or len(word) < SHORTEST_WORD or not plain:
                continue
            line = self.ids(f"The {word} {word}: {word}, {word}")
            if line == [*start, token, token, *self.colon, token, *self.comma, token]:
                words.append(token)
                if len(words) == WORDS:
                    break
        return words

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
