"""A row of tokens with the answers in it, and what they may be chosen from."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """Answers that a reader may choose from, as tokens; it takes the best next token of all of theirs."""

    answers: tuple[tuple[int, ...], ...]
    _following: dict[tuple[int, ...], Tensor] = field(default_factory=dict, compare=False, repr=False)

    def following(self, begun: tuple[int, ...]) -> Tensor:
        """[candidates' tokens] that may come after these, sorted."""
        if begun not in self._following:
            count = len(begun)
            tokens = {a[count] for a in self.answers if len(a) > count and a[:count] == begun}
            self._following[begun] = torch.tensor(sorted(tokens))
        return self._following[begun]

    def chance(self, answer: tuple[int, ...]) -> float:
        """How often random choices, token by token, give this answer."""
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
        place: index of the first token of what has to be found.
        chance: how often a guesser is right who knows what kind of answer it is.
        candidates: what the answers are chosen from in the easier form of the question, if it has one.
    """

    ids: Tensor
    answers: tuple[tuple[int, int], ...]
    place: int | None
    chance: float
    candidates: Candidates | None = None
