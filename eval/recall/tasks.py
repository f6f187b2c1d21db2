"""What is asked: samples of exact length, each with the place of what is asked for.

A sample is a row of tokens that ends with its answer, or with several answers and what asks for each. All
random choices come from the seed, the task, the length, the depth and the number of the sample.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import permutations

import torch

from hf_linattn.errors import DataError, OptionError

from .vocabulary import Candidates, Sample, Vocabulary

DIGITS = 5
CHOICES = 10
"""Pass keys among which the right one is chosen."""
FEWEST_WORDS = 16
SEGMENT = 64
"""Tokens that `induction` repeats, where the length and the vocabulary allow."""
PAIRS = 16
"""Pairs of `mqar`, where the length and the vocabulary allow."""

INTRO = (
    "There is important information hidden in a lot of irrelevant text. Find it and memorize it. I will ask "
    "you about it."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"

Build = Callable[[Vocabulary, int, float, random.Random], Sample]
"""(vocabulary, length, depth, random numbers) -> sample."""


def _passkey(vocabulary: Vocabulary, length: int, depth: float, rng: random.Random) -> Sample:
    """Hide a number of five digits in filler text (Mohtashami and Jaggi 2023, arXiv:2305.16300)."""
    numbers = rng.sample(range(10 ** (DIGITS - 1), 10**DIGITS), CHOICES)
    head = [*vocabulary.start, *vocabulary.ids(INTRO + "\n")]
    needle = vocabulary.line(NEEDLE.format(key=numbers[0]))
    answers = tuple(tuple(vocabulary.split(f"\n{QUESTION}", f" {number}")[1]) for number in numbers)
    question = vocabulary.split("\n", f"{QUESTION} {numbers[0]}")[1]
    room = length - len(head) - len(needle) - len(question)
    if room < 0:
        raise _too_short("passkey", length, length - room)
    before = round(depth * room)
    filler = vocabulary.line(FILLER)
    # cut at the front: what comes after the filler comes after a whole line
    filler *= room // len(filler) + 1
    head += filler[len(filler) - before :]
    tail = filler[len(filler) - (room - before) :]
    return Sample(
        ids=torch.tensor([*head, *needle, *tail, *question]),
        answers=((length - len(answers[0]), length),),
        place=len(head),
        chance=1 / (9 * 10 ** (DIGITS - 1)),
        candidates=Candidates(answers),
    )


def _key_value(vocabulary: Vocabulary, length: int, depth: float, rng: random.Random) -> Sample:
    """Build `red river: stone, green lake: wood, ...` over the whole context, then one of the keys again."""
    words = list(vocabulary.words)
    if len(words) < FEWEST_WORDS:
        raise DataError(
            f"key_value needs {FEWEST_WORDS} words that are one token each, and the tokenizer has "
            f"{len(words)}; take mqar, which asks the same with random tokens"
        )
    rng.shuffle(words)
    half = len(words) // 2
    value_words, key_words = words[:half], words[half:]
    colon, comma = vocabulary.colon, vocabulary.comma
    pair_size, asked_size = 3 + len(colon) + len(comma), 3 + len(colon)
    count, rest = divmod(length - len(vocabulary.start) - asked_size, pair_size)
    if count < 2 or rest > count - 1:
        raise _too_short("key_value", length, len(vocabulary.start) + asked_size + pair_size * pair_size)
    if count > len(key_words) * (len(key_words) - 1):
        raise DataError(
            f"key_value at {length} tokens needs {count} keys, more than the tokenizer has words for"
        )
    keys = [list(key) for key in _distinct_pairs(key_words, count, rng)]
    asked = round(depth * (count - 1))
    for other in rng.sample([i for i in range(count) if i != asked], rest):
        keys[other].append(rng.choice(value_words))  # a third word here and there makes the length exact
    values = [value_words[i % half] for i in range(count)]
    rng.shuffle(values)
    ids = list(vocabulary.start)
    place = 0
    for index, (key, value) in enumerate(zip(keys, values, strict=True)):
        if index == asked:
            place = len(ids)
        ids += [*key, *colon, value, *comma]
    ids += [*keys[asked], *colon, values[asked]]
    candidates = Candidates(tuple((value,) for value in sorted(set(values))))
    answer = ((length - 1, length),)
    return Sample(torch.tensor(ids), answer, place, 1 / len(candidates.answers), candidates)


def _induction(vocabulary: Vocabulary, length: int, depth: float, rng: random.Random) -> Sample:
    """Build random tokens of which a segment comes again at the end (Olsson et al. 2022, arXiv:2209.11895).

    No token of the segment appears anywhere else: what followed it the first time is the only right answer.
    """
    tokens, start = vocabulary.tokens, vocabulary.start
    size = min(SEGMENT, (length - len(start)) // 4, len(tokens) // 2)
    if size < 2:
        raise _too_short("induction", length, len(start) + 8, tokens)
    segment, others = _parted(tokens, [size], rng)
    room = length - len(start) - 2 * size
    before = round(depth * room)
    filler = rng.choices(others, k=room)
    ids = [*start, *filler[:before], *segment, *filler[before:], *segment]
    answers = tuple((i, i + 1) for i in range(length - size + 1, length))
    return Sample(torch.tensor(ids), answers, len(start) + before, 1 / len(tokens), vocabulary.every_token)


def _mqar(vocabulary: Vocabulary, length: int, depth: float, rng: random.Random) -> Sample:
    """Build random pairs `k v k v ...`, random tokens around them, and all pairs again in another order.

    Multi-query associative recall (Arora et al. 2023, arXiv:2312.04927): a query is a key, its answer the
    value. Keys, values and what is around them share no token.
    """
    tokens, start = vocabulary.tokens, vocabulary.start
    pairs = min(PAIRS, (length - len(start)) // 8, len(tokens) // 4)
    if pairs < 2:
        raise _too_short("mqar", length, len(start) + 16, tokens)
    keys, values, others = _parted(tokens, [pairs, pairs], rng)
    block = [token for pair in zip(keys, values, strict=True) for token in pair]
    room = length - len(start) - 4 * pairs
    before = round(depth * room)
    filler = rng.choices(others, k=room)
    queries = [token for i in rng.sample(range(pairs), pairs) for token in (keys[i], values[i])]
    ids = [*start, *filler[:before], *block, *filler[before:], *queries]
    answers = tuple((i, i + 1) for i in range(length - 2 * pairs + 1, length, 2))
    candidates = Candidates(tuple((value,) for value in sorted(values)))
    return Sample(torch.tensor(ids), answers, len(start) + before, 1 / pairs, candidates)


TASKS: dict[str, Build] = {
    "passkey": _passkey,
    "key_value": _key_value,
    "induction": _induction,
    "mqar": _mqar,
}


def build(task: str, vocabulary: Vocabulary, length: int, depth: float, seed: int, index: int) -> Sample:
    """Build sample number `index` of a task.

    Args:
        task: of `TASKS`.
        vocabulary: of the tokenizer.
        length: tokens of the sample.
        depth: where in the context the thing is, from 0 to 1.
        seed: of all random choices.
        index: of the sample.

    Raises:
        OptionError: the length is too short for the task.
        DataError: the tokenizer is too small for it.
    """
    return TASKS[task](vocabulary, length, depth, random.Random(f"{seed} {task} {length} {depth:g} {index}"))


def _parted(tokens: Sequence[int], sizes: list[int], rng: random.Random) -> list[list[int]]:
    """Draw disjoint parts of these sizes, and the rest."""
    drawn = rng.sample(tokens, sum(sizes))
    taken = set(drawn)
    parts = []
    for size in sizes:
        parts.append(drawn[:size])
        drawn = drawn[size:]
    return [*parts, [token for token in tokens if token not in taken]]


def _distinct_pairs(words: Sequence[int], count: int, rng: random.Random) -> list[tuple[int, int]]:
    if 2 * count > len(words) * (len(words) - 1):
        return rng.sample(list(permutations(words, 2)), count)
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < count:
        first, second = rng.sample(words, 2)
        pairs[first, second] = None
    return list(pairs)


def _too_short(
    task: str, length: int, needed: int, tokens: Sequence[int] | None = None
) -> OptionError | DataError:
    if tokens is not None and length >= needed:
        return DataError(f"{task} needs more random tokens than this tokenizer has: {len(tokens)}")
    return OptionError(f"{task} does not fit into {length} tokens: give it at least {needed}")
