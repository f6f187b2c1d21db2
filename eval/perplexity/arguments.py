"""The arguments of a perplexity run, checked alike from the command line and from Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from hf_linattn.errors import OptionError
from hf_linattn.patching.contexts import Branches

from ..common.cli import check_options_have_patch, parse_rope_scaling, refuse_options
from ..common.model_specs import parse_specs, specs_of
from ..common.models import UNPATCHED, ModelSpec, name_of
from ..common.results import recorded
from ..common.windows import Bos, Stride

LENGTHS = (512, 1024, 2048, 4096)
BRANCHES: tuple[Branches, ...] = ("both", "window", "rest", "none")
NOT_WITH_BRANCHES = ("compare", "baseline", "stream", "segment")


@dataclass
class PerplexityArguments:
    """Arguments of `perplexity`; each field is an option of the command.

    Attributes:
        model: folder or name of a causal language model, patched or not.
        data: text file, folder, table, or a dataset's name.
        output_dir: folder for the results; the same arguments resume there.
        tokenizer: folder or name of the tokenizer; None for the model's.
        column, split: text column of a table, split of a dataset given by name.
        lengths: tokens per window; None for 512 to 4096.
        stride: score the last `stride` tokens of each window (None for 256), or "full".
        max_tokens: scored tokens per length, or "all".
        batch_size: windows per forward pass; None for 1.
        bos: BOS before each document: "auto", "yes", "no"; or "window", at the start of every window.
        join: make one document of all.
        stream: read documents whole, carrying the state of linear attention.
        segment: tokens per step of a stream; None for 4096.
        patch, options: patch to try on the loaded model, and its options.
        rope_scaling: KIND:FACTOR, as in yarn:4; not for baselines.
        compare: entries PATCH[:OPTION=VALUE...][@KIND:FACTOR], curves of this one model.
        branches: parts of a hybrid to measure by themselves, see `hf_linattn.patching.contexts`.
        baseline: other models, or "unpatched" for the same without `patch` and `rope_scaling`.
        train_length: length to mark in the plot; None for that of the configuration.
        context_parallel: split each window over all processes, in place of dealing windows out.
        dtype: of the weights, "auto" as saved.
        seed: for patches with random parameters.

    Raises:
        OptionError: arguments that exclude each other, or cannot be read.
    """

    model: str
    data: str
    output_dir: Path
    tokenizer: str | None = None
    column: str = "text"
    split: str = "train"
    lengths: list[int] | None = None
    stride: Stride | None = None
    max_tokens: int | Literal["all"] = 65536
    batch_size: int | None = None
    bos: Bos = "auto"
    join: bool = False
    stream: bool = False
    segment: int | None = None
    patch: str | None = None
    options: dict[str, Any] | None = None
    rope_scaling: str | None = None
    compare: list[str] | None = None
    branches: list[Branches] | None = None
    baseline: list[str] = field(default_factory=list)
    train_length: int | None = None
    context_parallel: bool = False
    dtype: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse combinations in which an argument would do nothing, and fill in defaults."""
        self.output_dir = Path(self.output_dir)
        self._check_compare()
        self._check_branches()
        check_options_have_patch(self)
        for name in ("lengths", "stride", "batch_size") if self.stream else ("segment",):
            if getattr(self, name) is not None:
                side = "with" if self.stream else "without"
                raise OptionError(f"--{name.replace('_', '-')} has no meaning {side} --stream")
        if self.stream and UNPATCHED in self.baseline:
            raise OptionError("--stream needs linear attention, which --baseline unpatched has not")
        if self.stream and self.context_parallel:
            raise OptionError(
                "--context-parallel splits windows, and --stream reads one segment after the other: give "
                "--lengths in its place"
            )
        if self.stream and self.bos == "window":
            raise OptionError("--bos window has no meaning with --stream")
        if self.rope_scaling is not None:
            parse_rope_scaling(self.rope_scaling)
        defaults = {"lengths": list(LENGTHS), "stride": 256, "batch_size": 1, "segment": 4096, "options": {}}
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def _check_compare(self) -> None:
        """Say where in the entries of --compare another argument belongs."""
        if not self.compare:
            return
        instead = {
            "patch": f"--compare {','.join(self.compare)},{self.patch}",
            "options": "--compare logn:train_length=1024",
            "rope_scaling": f"--compare softmax@{self.rope_scaling}",
        }
        for name, entry in instead.items():
            if getattr(self, name) is not None:
                flag = name.replace("_", "-")
                raise OptionError(f"--{flag} has no meaning with --compare: write {entry}")
        if UNPATCHED in self.baseline:
            raise OptionError("--baseline unpatched has no meaning with --compare: its name there is softmax")
        for entry in self.compare:
            parse_specs(entry)
        specs_of(self.compare, self.model)

    def _check_branches(self) -> None:
        if self.branches is None:
            return
        for name in self.branches:
            if name not in get_args(Branches):
                raise OptionError(f"no branches {name!r}; there are {', '.join(get_args(Branches))}")
        refuse_options(self, NOT_WITH_BRANCHES, "with --branches")

    @property
    def budget(self) -> int | None:
        """`max_tokens` as functions take it: None for all."""
        return None if self.max_tokens == "all" else self.max_tokens

    @property
    def windows(self) -> dict[str, Any]:
        """Arguments of `plan_windows` besides the texts."""
        return {"lengths": self.lengths, "stride": self.stride, "max_tokens": self.budget}

    def recorded(self) -> dict[str, Any]:
        """Tell the arguments as results.json keeps them."""
        new = () if self.context_parallel else ("context_parallel",)  # runs of older versions go on
        if self.branches is None:
            return recorded(self, "branches", *new)
        return {**recorded(self, *NOT_WITH_BRANCHES, *new), "options": self.options or None}

    def model_specs(self) -> list[ModelSpec]:
        """Name the models to measure: the model, or all entries of --compare, then the baselines.

        Raises:
            OptionError: two would be the same.
        """
        name = name_of(self.model)
        label = " ".join(filter(None, [name, self.patch, self.rope_scaling]))
        specs = specs_of(self.compare or [], self.model)
        specs = specs or [ModelSpec(label, self.model, self.patch, self.options or {}, self.rope_scaling)]
        for baseline in dict.fromkeys(self.baseline):
            if baseline == UNPATCHED:
                specs.append(ModelSpec(f"{name} unpatched", self.model, UNPATCHED))
                continue
            label, taken = name_of(baseline), [spec.label for spec in specs]
            specs.append(ModelSpec(baseline if label in taken else label, baseline))
        if len({spec.label for spec in specs}) < len(specs):
            raise OptionError("a baseline is the measured model itself; leave out --baseline")
        return specs
