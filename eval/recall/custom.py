"""A user's own questions: a .jsonl file with a prompt and its answer in every line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_linattn.errors import DataError

from .tasks import TASKS
from .vocabulary import Candidates, Sample, Vocabulary

KEYS = ("prompt", "answer", "name", "depth", "candidates")
NAME = "cases"


@dataclass(frozen=True)
class Case:
    """One line of the file `where`; `depth` is None and `candidates` empty where it does not name them."""

    prompt: str
    answer: str
    name: str
    depth: float | None
    candidates: tuple[str, ...]
    where: str


def load_cases(path: Path) -> list[Case]:
    """Read all cases of a file; empty lines are skipped.

    Raises:
        DataError: there is no such file, nothing in it, or a line is no case; the message names it.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the cases {path}: {error}") from error
    cases = [_case(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not cases:
        raise DataError(f"{path} holds no cases; one is " + '{"prompt": "... The key is", "answer": " 42"}')
    return cases


def _case(line: str, where: str) -> Case:
    try:
        case: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is no JSON: {error}") from error
    if not isinstance(case, dict):
        raise DataError(f"{where} is no JSON object: {line[:60]}")
    if unknown := sorted(case.keys() - set(KEYS)):
        raise DataError(f"{where}: unknown key {unknown[0]!r}; a case has {', '.join(KEYS)}")
    for key in ("prompt", "answer"):
        if not isinstance(case.get(key), str) or not case[key]:
            raise DataError(f"{where}: {key!r} must be a text that is not empty")
    name, depth, candidates = case.get("name", NAME), case.get("depth"), case.get("candidates", [])
    if not isinstance(name, str) or not name or name in TASKS:
        raise DataError(f"{where}: 'name' must be a text, and none of {', '.join(TASKS)}, got {name!r}")
    number = isinstance(depth, int | float) and not isinstance(depth, bool)
    if depth is not None and not (number and 0 <= depth <= 1):
        raise DataError(f"{where}: 'depth' must be a number from 0 (start) to 1 (end), got {depth!r}")
    if not isinstance(candidates, list) or not all(isinstance(each, str) and each for each in candidates):
        raise DataError(f"{where}: 'candidates' must be a list of texts, got {candidates!r}")
    if candidates and case["answer"] not in candidates:
        raise DataError(f"{where}: the answer {case['answer']!r} is none of its candidates")
    where_from = None if depth is None else float(depth)
    return Case(case["prompt"], case["answer"], name, where_from, tuple(candidates), where)


def grouped(
    cases: Iterable[Case], vocabulary: Vocabulary, lengths: Sequence[int]
) -> Iterator[tuple[str, int, float | None, list[Sample]]]:
    """Yield (name, length, depth, samples): cases of one name and depth that fit into the same length.

    Raises:
        DataError: a case is longer than all lengths, or its candidates cannot be told from its prompt.
    """
    groups: dict[tuple[str, int, float | None], list[Sample]] = {}
    for case in cases:
        sample = _sample(case, vocabulary)
        fitting = [length for length in sorted(lengths) if length >= len(sample.ids)]
        if not fitting:
            raise DataError(
                f"{case.where} has {len(sample.ids)} tokens, more than the longest of the lengths, "
                f"{max(lengths)}: add a longer one"
            )
        groups.setdefault((case.name, fitting[0], case.depth), []).append(sample)

    def order(key: tuple[str, int, float | None]) -> tuple[str, int, bool, float]:
        return key[0], key[1], key[2] is None, key[2] or 0.0

    for key in sorted(groups, key=order):
        yield (*key, groups[key])


def _sample(case: Case, vocabulary: Vocabulary) -> Sample:
    prompt, answer = vocabulary.split(case.prompt, case.answer)
    head = [*vocabulary.start, *prompt]
    if not head or not answer:
        raise DataError(f"{case.where}: the prompt or the answer has no token of its own")
    candidates = None
    # without candidates nothing is known of the answer: any token of the vocabulary could stand there
    chance = float(vocabulary.size) ** -len(answer)
    if case.candidates:
        answers = []
        for text in case.candidates:
            whole = vocabulary.ids(case.prompt + text)
            if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
                raise DataError(
                    f"{case.where}: with the candidate {text!r} the prompt has other tokens than with the "
                    "answer; begin all of them with a blank, or none"
                )
            answers.append(tuple(whole[len(prompt) :]))
        candidates = Candidates(tuple(dict.fromkeys(answers)))
        chance = candidates.chance(tuple(answer))
    ids = torch.tensor([*head, *answer])
    return Sample(ids, ((len(head), len(ids)),), None, chance, candidates)
