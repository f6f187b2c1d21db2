"""The options of `python -m hf_linattn.convert`, as a dataclass and as a parser; its rates."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_linattn.cli.arguments import add_options, option
from hf_linattn.convert.presets import (
    AUTO,
    NAMED,
    PLAIN,
    PRESETS,
    QUARTER,
    RECALL,
    SMALL,
    STAGES,
    Preset,
    find_preset,
)
from hf_linattn.errors import OptionError
from hf_linattn.training.arguments import TrainingArguments

EPILOG = """\
examples:
  python -m hf_linattn.convert --model models/small --data books/ --eval-data moby.txt --output-dir out
  python -m hf_linattn.convert ... --tokens 10000000               # better, in ten times the time
  python -m hf_linattn.convert ... --resume                         # after a crash or Ctrl-C
  python -m hf_linattn.convert ... --preset linear                 # no softmax, one state of constant size
  python -m hf_linattn.convert ... --preset recall                 # softmax in a quarter of the layers
  python -m hf_linattn.convert ... --keep 2                        # in two, those that recall
  python -m hf_linattn.convert ... --patch window+hedgehog --options '{"size": 32}'   # another attention
  python -m hf_linattn.convert ... --options '{"size": 128}'       # the preset's, with a larger window
  python -m hf_linattn.convert ... --patch elu1 --learn-front      # a learned layer in front of a fixed map
  python -m hf_linattn.convert ... --stages distill                # one stage alone, with all tokens
  accelerate launch --num_processes 2 -m hf_linattn.convert --model Qwen/Qwen3-0.6B --mixed-precision bf16 \\
      --data wikitext:wikitext-103-raw-v1 --tokens 20000000 --output-dir out

presets: what is done where you give nothing else; whatever you give wins
  auto     h2o for causal models of 100 million parameters or more, hybrid for others, and where you name a
           patch, stages, their tokens or --cache-teacher
  recall   the same, but a quarter of the layers stay softmax: auto --keep quarter
  hybrid   a window of 64 to 256 tokens (a thirty-second of the context) and 4 sinks, and a gated state for
           what lies before (window+gated, hedgehog's map); a tenth of the tokens for stage transfer, the rest
           for distill with the text's own loss, in steps of 2 rows (--batch-size 2 --adam-beta2 0.999
           --patch-rate 10 --ce-weight 1 --eval-every 200)
  linear   a gated state alone (taylor2's map, a learned layer in front of it); the same recipe
  h2o      softmax over 64 to 240 tokens, 4 sinks, and half as many tokens behind them, those that got most
           attention. Layers that lose more by it keep more tokens, all together as many: it measures each
           alone, before (sizes.json). Just put in it says what the model said, so that all tokens are for
           stage finetune: it learns the text, in such steps. Nearest to the control in models that recall
  plain    hedgehog and the options' own defaults, for experiments: a fifth of the tokens for transfer, the
           rest for distill, steps of 8 rows
  With --keep N some layers stay softmax, whatever the preset: those without which the model finds least
  again, as hf_linattn.eval.layers measures after stage transfer or, with h2o, before it trains. What it
  measured is in layers/. For each layer that is a pass over eight rows, with h2o of up to 1,920 tokens.
  With --patch the preset's patch and options are left out, its recipe stays. Encoders have no state that
  forgets: presets give them hedgehog. A patched --model keeps what it has.

stages:
  transfer   the new attention of every layer learns, beside the old one and from the same inputs, to give
             what that gives; only the patch's own parameters train, and all layers in one pass. The loss is
             the mean squared error of the attention's outputs over their variance (0 is perfect, 1 no better
             than the mean), or with --target weights the divergence of the attention weights. Hybrids of a
             window train their linear part alone, as if there were no window.
             Before it, patches that can (delta) are calibrated: rates at which their states forget are tried
             out on --calibrate-tokens of the text against the model's own attention.
  distill    the whole model learns the token probabilities of the unpatched one: Kullback-Leibler
             divergence in nats per token. --ce-weight W adds W times the loss of stage finetune, so that it
             learns from both at once.
  finetune   prediction of the text itself, on rows of --finetune-length tokens; off unless it has tokens.
  --tokens are those of all stages, or of those that --stages names; --transfer-tokens and its like say how
  many one of them gets, 0 leaves it out. Without --lora all weights train where every layer is linear (a
  window and h2o are softmax) and, but for --preset plain, in models below 100 million parameters; else
  LoRA of rank 16, beside the patch's own parameters. With LoRA the teacher is the model itself, without
  patch and LoRA.

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
  LoRA, half of that with --ce-weight; finetune half of distill's, or as much where no stage distill comes
  before it; transfer 1e-2 for maps, a tenth of that for copies of projections. The patch's parameters are
  younger than the others: --patch-rate 10 lets them learn ten times as fast.

data:
  As for hf_linattn.finetune. With --data self the model writes its text itself, sampled row by row: about as
  slow as writing so many tokens, kept in self.jsonl of the output directory. --eval-data self is other such
  text. A file or folder of this name is ./self.

output directory:
  transfer/, distill/, finetune/: the model after each stage, which hf_linattn.from_pretrained loads, with
  README.md (a model card), train.csv, loss.png, results.json. The last of them is the result. validation.json
  has the loss on --eval-data of the original, of the swapped model and after each stage; report.html shows
  everything on one page. Every stage can be killed at any moment: --resume goes on and, on a CPU, ends with
  the same model byte for byte.
"""

GROUPS = {
    "what one needs": (
        *("model", "data", "output_dir", "preset", "tokens", "keep", "eval_data", "resume", "cpu"),
        "mixed_precision",
    ),
    "patch and stages": (
        *("patch", "options", "learn_front", "stages", "transfer_tokens", "distill_tokens"),
        *("finetune_tokens", "finetune_length"),
    ),
    "training": (
        *("block_size", "batch_size", "grad_accum", "lora", "ce_weight", "patch_rate", "transfer_lr"),
        *("distill_lr", "finetune_lr", "min_lr_rate", "optimizer", "adam_beta2", "no_dropout", "dtype"),
        *("gradient_checkpointing", "compile", "seed", "eval_every", "eval_blocks", "patience", "overwrite"),
        "log_with",
    ),
    "expert options": (),
}


def number_of_layers(value: int | str | None) -> int | str | None:
    """Read how many layers stay softmax: a whole number of at least 1, `quarter`, or None.

    Raises:
        OptionError: it is something else.
    """
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if number is None or number == QUARTER or (isinstance(number, int) and number >= 1):
        return number
    raise OptionError(f"softmax layers to keep must be at least 1, or {QUARTER}, not {value!r}")


def of_preset(name: str, text: str, **extra: Any) -> Any:
    """Declare a field that the preset fills; what an earlier version did not know was as `plain` has it."""
    return option(None, f"{text} (default: the preset's)", formerly=PLAIN[name], **extra)


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
            "help": "attention to convert to: a name, or JSON per layer (default: the preset's, or what a "
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
    eval_every: int = of_preset("eval_every", "steps between validations", minimum=1)
    batch_size: int = of_preset("batch_size", "rows per process and forward pass", minimum=1)
    adam_beta2: float = of_preset(
        "adam_beta2",
        "AdamW's beta2; nearer to 1 for steps of few rows (arXiv:2507.07101)",
        minimum=0,
        maximum=0.9999,
    )
    patience: int = option(
        0,
        "end a stage after so many validations without a lower loss, and keep the weights of the best; "
        "0 never does, and keeps the last",
        minimum=0,
    )
    preset: str = option(AUTO, "what is wanted (see below)", metavar=f"{{{','.join((*NAMED, *PRESETS))}}}")
    tokens: int = option(1_000_000, "tokens to train on, in all stages together", minimum=1)
    keep: int | str | None = option(
        None,
        f"layers that stay softmax, those that the model needs most to recall: a number, or {QUARTER} "
        f"(default: none; {QUARTER} for --preset recall)",
        metavar="N",
        parse=number_of_layers,
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
    drop_window: float = of_preset(
        "drop_window",
        "part of the steps of stage distill in which hybrids have no window",
        minimum=0,
        maximum=1,
    )
    ce_weight: float = of_preset(
        "ce_weight", "weight of the text's own loss, added to the divergence in stage distill", minimum=0
    )
    patch_rate: float = of_preset(
        "patch_rate",
        "factor of the learning rate for the patch's parameters in distill and finetune",
        minimum=0,
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
        """Check values as the command line does, and take from the preset what was not given.

        Raises:
            OptionError: a value out of its bounds, options that exclude each other, or no stage.
        """
        recipe = self.chosen_preset.recipe
        self.filled = {name for name in recipe if getattr(self, name) is None}
        for name in self.filled:
            setattr(self, name, recipe[name])
        super().__post_init__()
        if self.compile and self.gradient_checkpointing and self.drop_window:
            if "drop_window" not in self.filled:
                raise OptionError("--drop-window needs --compile or --gradient-checkpointing left out")
            self.drop_window = 0.0
        self.chosen_stages()  # raises where there is none
        self.keep = number_of_layers(QUARTER if self.preset == RECALL and self.keep is None else self.keep)

    @property
    def chosen_preset(self) -> Preset:
        """What fills in the options that were not given."""
        return find_preset(self.preset)

    def stage_tokens(self, stage: str) -> int:
        """Count the tokens that a stage trains on, before they are rounded up to whole steps."""
        given: int | None = getattr(self, f"{stage}_tokens")
        named = None if self.stages is None else self._named()
        return self.chosen_preset.tokens(stage, self.tokens, named) if given is None else given

    def chosen_stages(self) -> list[str]:
        """List the stages in their order.

        Raises:
            OptionError: an unknown stage, or none.
        """
        chosen = [name for name in self._named() if self.stage_tokens(name)]
        if not chosen:
            raise OptionError("no stage is left: every one has 0 tokens")
        return chosen

    def _named(self) -> list[str]:
        names = STAGES if self.stages is None else [name.strip() for name in self.stages.split(",")]
        unknown = [name for name in names if name not in STAGES]
        if unknown:
            raise OptionError(f"--stages: {unknown[0]!r} is none of {', '.join(STAGES)}")
        return [name for name in STAGES if name in names]

    def length(self, stage: str) -> int:
        """Count the tokens per row of a stage."""
        return self.block_size if stage != "finetune" else self.finetune_length or self.block_size

    def lora_rank(self, parameters: int, hybrid: bool) -> int:
        """Tell the rank of LoRA behind stage transfer; 0 trains all weights.

        Args:
            parameters: of the model.
            hybrid: whether a layer keeps softmax, be it over a window or over chosen tokens (`h2o`).
        """
        if self.lora is not None:
            return self.lora
        return 16 if hybrid and (self.preset == "plain" or parameters >= SMALL) else 0


def learning_rate_for(stage: str, parameters: int, lora: int, ce_weight: float = 0.0) -> float:
    """Tell the default peak rate of a stage for a model of this size; see `--help`."""
    if stage == "transfer":
        return 1e-2
    rate = 1e-4 * (2e9 / max(parameters, 1)) ** 0.32
    rate = min(max(rate, 1e-5), 2e-3) * (5 if lora else 1) / (2 if ce_weight else 1)
    return float(f"{rate if stage == 'distill' else rate / 2:.2g}")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command, with one option per field of `ConvertArguments`, in groups."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_linattn.convert",
        usage="%(prog)s --model M --data D --output-dir O [--preset NAME] [--tokens N] [more options]",
        description="Convert a pretrained language model to another attention, in stages. Model, text and "
        "folder are enough: the rest is the best recipe that was measured.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, ConvertArguments, GROUPS)
    return parser
