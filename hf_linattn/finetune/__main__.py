"""Fine-tune a model, patched or not, on plain text.

    accelerate launch -m hf_linattn.finetune --model DIR --patch elu1 --data books/ --output-dir out

`finetune(FinetuneArguments(...))` is the same from Python.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_linattn.cli.arguments import add_options, check_values, option
from hf_linattn.cli.main import exit_status, quiet_libraries, start_missing_processes
from hf_linattn.errors import OptionError

EPILOG = """\
examples:
  python -m hf_linattn.finetune --model models/small --patch elu1 --data books/ --eval-data moby.txt \\
      --block-size 512 --max-steps 500 --lr 1e-3 --output-dir out
  python -m hf_linattn.finetune ... --output-dir out --resume   # after a crash or Ctrl-C; also the first time
  accelerate launch --num_processes 2 -m hf_linattn.finetune --model Qwen/Qwen3-0.6B \\
      --patch '{"0-13": "elu1"}' --data wikitext:wikitext-103-raw-v1 --lora 16 \\
      --mixed-precision bf16 --output-dir out
  python -m hf_linattn.finetune --model DIR --patch softmax1+logn --options '{"train_length": 2048}' \\
      --data articles.jsonl --text-column body --output-dir out
  python -m hf_linattn.finetune --model bert-base-uncased --patch elu1 --no-dropout --data books/ \\
      --block-size 128 --output-dir out          # an encoder: masked-language modelling

data:
  A text file is one document; a folder gives every .txt, .md, .py, .rst and .raw file below it; a .jsonl,
  .json, .parquet or .csv file gives one document per row; anything else is a name for datasets.load_dataset
  (name:config). Each document is preceded by the tokenizer's BOS token (else EOS, else nothing); all are
  joined in order and cut into blocks of --block-size tokens, the rest is dropped. Attention crosses the
  borders of documents in a block.

objective:
  causal predicts every next token. mlm (BERT's) hides 15 % of the tokens of every block: 80 % of these become
  the mask token, 10 % any token, 10 % stay; the loss is over them alone, with new masks at every step and
  fixed ones in validation. Its blocks stand between the special tokens that the tokenizer puts around a text
  ([CLS] ... [SEP]), and a document ends with the separator instead of beginning with BOS.
  auto takes mlm for a checkpoint saved from a masked-LM class, and for a bare encoder (BertModel) whose type
  has one, unless its config says is_decoder; otherwise causal. A model that sees later tokens is never
  trained causally.

batches:
  One step uses --batch-size x --grad-accum x processes blocks. The loss is the mean over all their tokens;
  which blocks they are depends on --seed and the step alone.

output directory:
  model.safetensors, config.json and the tokenizer (load them with hf_linattn.from_pretrained); adapter/ with
  --lora, whose weights are also merged into model.safetensors; train.csv, loss.png, results.json; run.json,
  and checkpoint/ while it runs. A run interrupted at any moment is continued by --resume, and on a CPU it
  ends with the same model byte for byte.
"""


@dataclass
class FinetuneArguments:
    """Everything `finetune` is told; each field is an option of the command."""

    model: str = field(metadata={"help": "folder or Hub name of a language model or encoder, patched or not"})
    data: str = field(
        metadata={"help": "text file, folder, .jsonl/.parquet/.csv, or dataset name (see below)"}
    )
    output_dir: str = field(metadata={"help": "where everything is written"})
    patch: str | dict[str, str] | None = field(
        default=None,
        metadata={
            "help": "attention to install: a name, or JSON per layer (default: leave the model as it is)",
            "parse": "patch",
        },
    )
    options: dict[str, Any] | None = field(
        default=None, metadata={"help": "the patch's options as JSON", "parse": "json", "metavar": "JSON"}
    )
    sliding: Literal["keep", "global", "refuse"] = option(
        "keep", "sliding-window layers: see patch_model", choices=("keep", "global", "refuse")
    )
    objective: Literal["auto", "causal", "mlm"] = option(
        "auto", "what is predicted: next or masked tokens (see below)", choices=("auto", "causal", "mlm")
    )
    tokenizer: str | None = option(None, "folder or name of the tokenizer (default: the model's)")
    text_column: str = option("text", "column of a table or dataset that holds the text")
    data_split: str = option("train", "split of --data when it is a dataset name")
    block_size: int = option(512, "tokens per training row", minimum=2)
    max_steps: int = option(1000, "updates of the weights", minimum=1)
    lr: float = option(1e-4, "peak learning rate", minimum=0)
    min_lr_rate: float = option(
        0.1, "learning rate at the last step over the peak; a cosine between", minimum=0, maximum=1
    )
    warmup: int | None = option(None, "steps of linear warm-up (default: 3 %% of --max-steps)", minimum=0)
    batch_size: int = option(8, "rows per process and forward pass", minimum=1)
    grad_accum: int = option(1, "forward passes per update", minimum=1)
    optimizer: Literal["adamw", "muon"] = option(
        "adamw",
        "adamw; or muon for the weights of linear layers and AdamW for the rest, at the same --lr",
        choices=("adamw", "muon"),
    )
    adam_beta2: float = option(
        0.95, "AdamW's beta2; nearer to 1 for steps of few rows (arXiv:2507.07101)", minimum=0, maximum=0.9999
    )
    weight_decay: float = option(0.0, "the optimizer's weight decay", minimum=0)
    max_grad_norm: float = option(1.0, "clip the gradient to this norm; 0 does not clip", minimum=0)
    lora: int = option(
        0, "rank of LoRA on all linear layers; the patch's own parameters train in full", minimum=0
    )
    lora_alpha: int | None = option(None, "LoRA's scale times its rank (default: twice the rank)", minimum=1)
    train_only_patch: bool = option(False, "train the patch's parameters and freeze everything else")
    no_dropout: bool = option(False, "switch dropout off; linear patches have no attention weights to drop")
    mixed_precision: str | None = option(
        None, "default: as accelerate is configured, else no", choices=("no", "bf16", "fp16")
    )
    dtype: str = option("float32", "dtype of the weights", choices=("float32", "bfloat16"))
    seed: int = option(0, "decides new weights, the order of the data and dropout", minimum=0)
    eval_data: str | None = option(None, "text for the validation loss, as --data; start, every N steps, end")
    eval_split: str = option("validation", "split of --eval-data when it is a dataset name")
    eval_every: int = option(100, "steps between validations", minimum=1)
    patience: int = option(
        0,
        "stop after so many validations without a lower loss, and keep the weights of the best; "
        "0 goes on to --max-steps, and keeps the last",
        minimum=0,
    )
    eval_blocks: int = option(64, "blocks of --eval-data to use, from its start", minimum=1)
    checkpoint_every: int = option(100, "steps between checkpoints; only the latest is kept", minimum=1)
    resume: bool = option(False, "continue what is in --output-dir, or start when nothing is")
    overwrite: bool = option(False, "delete the run in --output-dir first")
    cpu: bool = option(False, "use the CPU even where there is a GPU")

    def __post_init__(self) -> None:
        """Check values as the command line does, so that both ways in refuse the same."""
        check_values(self)
        for first, second in (("lora", "train_only_patch"), ("resume", "overwrite")):
            if getattr(self, first) and getattr(self, second):
                flags = f"--{first.replace('_', '-')} and --{second.replace('_', '-')}"
                raise OptionError(f"{flags} exclude each other")
        if self.patch == "none":
            self.patch = None
        if self.options and self.patch is None:
            raise OptionError("--options belong to a --patch, and none is given")
        if self.patience and self.eval_data is None:
            raise OptionError("--patience watches the validation loss: give --eval-data")
        if self.warmup is None:
            self.warmup = math.ceil(0.03 * self.max_steps)


def build_parser() -> argparse.ArgumentParser:
    """The command's parser, one option per field of `FinetuneArguments`."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_linattn.finetune",
        description="Fine-tune a language model or encoder, its attention patched or not, on plain text.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, FinetuneArguments)
    return parser


def finetune(arguments: FinetuneArguments, command: str | None = None) -> dict[str, Any]:
    """Train as told and return what `results.json` holds.

    Args:
        arguments: the options.
        command: how the run was started, for the record; by default the call from Python.

    Raises:
        DataError: the text or the tokenizer cannot be used.
        TrainingError: training cannot start or go on; the message names the step and what is kept.
        OptionError: an option cannot be used on this machine.
    """
    # Imported here so that --help and a wrong option answer without loading accelerate and datasets.
    from hf_linattn.finetune.run import run

    return run(arguments, command or f"finetune({arguments!r})")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    try:
        arguments = FinetuneArguments(**vars(parser.parse_args(argv)))
    except OptionError as error:
        parser.error(str(error))
    command = shlex.join(["python", "-m", "hf_linattn.finetune", *argv])
    process = int(os.environ.get("RANK", "0"))

    def work() -> None:
        start_missing_processes("hf_linattn.finetune", argv)
        quiet_libraries(process)
        results = finetune(arguments, command)
        if process == 0:
            sys.stdout.write(_summary(results))

    told = "the same command with --resume continues from the last checkpoint"
    return exit_status(work, interrupted=told, extra="train", process=process)


def _summary(results: dict[str, Any]) -> str:
    lines = [f"{results['steps']} steps, {results['tokens']:,} tokens, {results['seconds']:.0f} s"]
    if results["eval_loss"] is not None:
        before, after = results["eval_loss_before"], results["eval_loss"]
        token = "masked token" if results.get("objective") == "mlm" else "token"
        lines.append(
            f"validation loss {before:.4f} -> {after:.4f} nats per {token} "
            f"(perplexity {math.exp(before):.2f} -> {math.exp(after):.2f})"
        )
    if results.get("kept_step", results["steps"]) < results["steps"]:  # older runs name none
        lines.append(f"the weights are those of step {results['kept_step']}, the best validation")
    lines.append(f"model, train.csv, loss.png and results.json are in {results['arguments']['output_dir']}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
