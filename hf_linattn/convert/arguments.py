"""The options of `python -m hf_linattn.convert`, as a dataclass and as a parser; its presets and rates."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_linattn.cli.arguments import add_options, option
from hf_linattn.errors import OptionError
from hf_linattn.training.arguments import TrainingArguments

EPILOG = """\
stages:
  transfer   the new attention of every layer learns, beside the old one and from the same inputs, to give
             what that gives; only the patch's own parameters train, and all layers in one pass. The loss is
             the mean squared error of the attention's outputs over their variance (0 is perfect, 1 no better
             than the mean), or with --target weights the divergence of the attention weights. Hybrids of a
             window train their linear part alone, as if there were no window.
             Before it, patches that can (delta) are calibrated: rates at which their states forget are tried
             out on --calibrate-tokens of the text against the model's own attention.
  distill    the whole model learns the token probabilities of the unpatched one: Kullback-Leibler
             divergence in nats per token. All weights for plans that are linear everywhere; LoRA (and the
             patch's parameters) for hybrids, whose teacher is then the model itself without patch and LoRA.
             --ce-weight W adds W times the loss of stage finetune, so that it learns from both at once.
  finetune   prediction of the text itself, on rows of --finetune-length tokens.

presets: tokens of each stage; --transfer-tokens and its like change one, 0 leaves a stage out
                transfer    distill    finetune
  quick             200k       800k           0    minutes for a model of a million parameters on a CPU
  full               10M        60M         10M    finetune rows of 4 x --block-size
  lora                5M        15M           0    LoRA also where all weights would train

objective:
  Causal models predict the next token; encoders with a masked-LM head (--objective auto tells them) the
  masked ones: rows are masked as by hf_linattn.finetune, both models see the masks, and stage distill
  compares the predictions of every token. Models without a head, such as sentence encoders, give hidden
  states: stage distill takes the squared error of every layer's over the original's variance, validation
  that of the last layer's, and stage finetune has nothing to predict. --objective states does so with any
  model. Let --block-size be the length of what it will read.

learning rates:
  Small models need higher ones. Unless given, stage distill takes 1e-4 x (2e9 / parameters)^0.32, between
  1e-5 and 2e-3 (1e-3 at 1.4 million parameters, measured; 1e-4 at 2 billion, published), five times that with
  LoRA; finetune half of it; transfer 1e-2 for maps, a tenth of that for copies of projections. The patch's
  parameters are younger than the others: --patch-rate 10 lets them learn ten times as fast.

data:
  As for hf_linattn.finetune. With --data self the model writes its text itself, sampled row by row: about as
  slow as writing so many tokens, kept in self.jsonl of the output directory. --eval-data self is other such
  text. A file or folder of this name is ./self.

examples:
  python -m hf_linattn.convert --model models/small --patch hedgehog --data books/ --eval-data moby.txt \\
      --preset quick --output-dir out
  python -m hf_linattn.convert ... --output-dir out --resume   # after a crash or Ctrl-C; also the first time
  python -m hf_linattn.convert ... --patch elu1 --learn-front   # a learned layer in front of a fixed map
  python -m hf_linattn.convert ... --patch window+hedgehog --options '{"size": 64}' --drop-window 0.1
  python -m hf_linattn.convert ... --stages distill                # one stage alone
  accelerate launch --num_processes 2 -m hf_linattn.convert --model Qwen/Qwen3-0.6B --mixed-precision bf16 \\
      --patch '{"0,2-13,15-26": "hedgehog"}' --data wikitext:wikitext-103-raw-v1 --preset lora \\
      --output-dir out

output directory:
  transfer/, distill/, finetune/: the model after each stage, which hf_linattn.from_pretrained loads, with
  README.md (a model card), train.csv, loss.png, results.json. The last of them is the result. validation.json
  has the perplexity of the original, of the swapped model and after each stage; report.html shows everything
  on one page. Every stage can be killed at any moment: --resume goes on and, on a CPU, ends with the same
  model byte for byte.
"""

STAGES = ("transfer", "distill", "finetune")
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"tokens": (200_000, 800_000, 0), "longer": 1},
    "full": {"tokens": (10_000_000, 60_000_000, 10_000_000), "longer": 4},
    "lora": {"tokens": (5_000_000, 15_000_000, 0), "longer": 1, "lora": 16},
}


@dataclass
class ConvertArguments(TrainingArguments):
    """Options of `convert`; each field is an option of the command.

    >>> ConvertArguments(model="model", data="text.txt", output_dir="out").chosen_stages()
    ['transfer', 'distill']
    """

    model: str = field(metadata={"help": "folder, Hub name or FILE.gguf of a language model"})
    data: str = field(metadata={"help": "text, as hf_linattn.finetune takes it; or self: see below"})
    patch: str | dict[str, Any] | None = field(
        default=None,
        metadata={
            "help": "attention to convert to: a name, or JSON per layer (default: hedgehog, or what a "
            "patched --model has)",
            "parse": "patch",
        },
    )
    objective: str = option(
        "auto", "what the model gives (see below)", choices=("auto", "causal", "mlm", "states")
    )
    optimizer: Literal["adamw", "muon"] = option(
        "adamw",
        "adamw; or muon for the weights of linear layers and AdamW for the rest, at the same rates",
        choices=("adamw", "muon"),
    )
    min_lr_rate: float = option(
        0.1, "learning rate at the last step of a stage over the peak; a cosine between", minimum=0, maximum=1
    )
    eval_data: str | None = option(None, "text for validation, as --data")
    eval_every: int = option(50, "steps between validations", minimum=1)
    patience: int = option(
        0,
        "end a stage after so many validations without a lower loss, and keep the weights of the best; "
        "0 never does, and keeps the last",
        minimum=0,
    )
    preset: Literal["quick", "full", "lora"] = option(
        "quick", "how much of each stage (see below)", choices=tuple(PRESETS)
    )
    stages: str | None = option(None, "stages to run, joined by commas (default: those of the preset)")
    transfer_tokens: int | None = option(None, "tokens of stage transfer", minimum=0)
    distill_tokens: int | None = option(None, "tokens of stage distill", minimum=0)
    finetune_tokens: int | None = option(None, "tokens of stage finetune", minimum=0)
    finetune_length: int | None = option(None, "tokens per row of stage finetune", minimum=2)
    calibrate_tokens: int = option(
        4096,
        "tokens that the first weights of a patch are computed from, where it has such (delta); 0 for none",
        minimum=0,
    )
    learn_front: bool = option(False, "a learned linear layer in front of a map that has nothing to train")
    target: Literal["output", "weights"] = option(
        "output", "what stage transfer compares", choices=("output", "weights")
    )
    train_projections: bool = option(
        False, "stage transfer also trains copies of the query, key, value and output projections"
    )
    drop_window: float = option(
        0.0, "part of the steps of stage distill in which hybrids have no window", minimum=0, maximum=1
    )
    ce_weight: float = option(
        0.0, "weight of the text's own loss, added to the divergence in stage distill", minimum=0
    )
    patch_rate: float = option(
        1.0, "factor of the learning rate for the patch's parameters in distill and finetune", minimum=0
    )
    teacher: str | None = option(None, "the original, where --model is converted in part (default: --model)")
    cache_teacher: str | None = option(
        None,
        "folder of the original's top predictions of each token: written before the first stage where it is "
        "not there, and read in stage distill in place of running the original",
    )
    lora: int | None = option(
        None,
        "rank of LoRA in distill and finetune; 0 trains all weights (default: see below)",
        minimum=0,
    )
    transfer_lr: float | None = option(None, "peak learning rate of stage transfer", minimum=0)
    distill_lr: float | None = option(None, "peak learning rate of stage distill", minimum=0)
    finetune_lr: float | None = option(None, "peak learning rate of stage finetune", minimum=0)

    def __post_init__(self) -> None:
        """Check values as the command line does.

        Raises:
            OptionError: a value out of its bounds, options that exclude each other, or no stage.
        """
        super().__post_init__()
        if self.compile and self.gradient_checkpointing and self.drop_window:
            raise OptionError("--drop-window needs --compile or --gradient-checkpointing left out")
        self.chosen_stages()

    def tokens(self, stage: str) -> int:
        """Count the tokens that a stage trains on, before they are rounded up to whole steps."""
        option: int | None = getattr(self, f"{stage}_tokens")
        if option is not None:
            return option
        of_preset: int = PRESETS[self.preset]["tokens"][STAGES.index(stage)]
        named = self.stages is not None and not of_preset
        return PRESETS["quick"]["tokens"][1] if named else of_preset

    def chosen_stages(self) -> list[str]:
        """List the stages in their order.

        Raises:
            OptionError: an unknown stage, or none.
        """
        named = STAGES if self.stages is None else [name.strip() for name in self.stages.split(",")]
        unknown = [name for name in named if name not in STAGES]
        if unknown:
            raise OptionError(f"--stages: {unknown[0]!r} is none of {', '.join(STAGES)}")
        chosen = [name for name in STAGES if name in named and self.tokens(name)]
        if not chosen:
            raise OptionError("no stage is left: every one has 0 tokens")
        return chosen

    def length(self, stage: str) -> int:
        """Count the tokens per row of a stage."""
        if stage != "finetune":
            return self.block_size
        return self.finetune_length or self.block_size * int(PRESETS[self.preset]["longer"])


def learning_rate_for(stage: str, parameters: int, lora: int) -> float:
    """Tell the default peak rate of a stage for a model of this size; see `--help`."""
    if stage == "transfer":
        return 1e-2
    rate = 1e-4 * (2e9 / max(parameters, 1)) ** 0.32
    rate = min(max(rate, 1e-5), 2e-3) * (5 if lora else 1)
    return float(f"{rate if stage == 'distill' else rate / 2:.2g}")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command, with one option per field of `ConvertArguments`."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_linattn.convert",
        description="Convert a pretrained language model to another attention, in stages.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, ConvertArguments)
    return parser
