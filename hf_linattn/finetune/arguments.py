"""The options of `python -m hf_linattn.finetune`, as a dataclass and as a parser."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from hf_linattn.cli.arguments import add_options, option
from hf_linattn.errors import OptionError
from hf_linattn.training.arguments import TrainingArguments

EPILOG = """\
examples:
  python -m hf_linattn.finetune --model models/small --patch elu1 --data books/ --eval-data moby.txt \\
      --block-size 512 --max-steps 500 --lr 1e-3 --output-dir out
  python -m hf_linattn.finetune ... --output-dir out --resume   # after a crash or Ctrl-C; also the first time
  accelerate launch --num_processes 2 -m hf_linattn.finetune --model Qwen/Qwen3-0.6B \\
      --patch '{"0-13": "elu1"}' --data wikitext:wikitext-103-raw-v1 --lora 16 \\
      --mixed-precision bf16 --output-dir out
  accelerate launch --cpu --num_processes 2 -m hf_linattn.finetune --model DIR --patch window+gated \\
      --data books/ --block-size 65536 --batch-size 1 --context-parallel 2 --cpu --output-dir out
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
  A table or dataset with a column messages (lists of {role, content}) and no column of text is chat: it is
  written by the tokenizer's chat template, and the assistant's tokens alone are learned.
  --streaming reads the text in order, a dataset over the network too, and no further than the run takes it:
  the first --max-steps x batch blocks, or all if there are fewer. They lie in blocks.bin of the output
  directory (4 bytes a token) while the run goes on, and never in memory. Their order is shuffled as ever.

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

rows over several processes:
  With --context-parallel N each row is split over N neighbouring processes: --batch-size counts rows per N.
  Linear layers pass their states on, windows their last tokens, softmax layers their keys. Losses and
  gradients are those of one process, but for rounding; the memory of activations falls with N. For causal
  models, replicated and not sharded (docs/context-parallel.md).

output directory:
  model.safetensors, config.json and the tokenizer (load them with hf_linattn.from_pretrained); adapter/ with
  --lora, whose weights are also merged into model.safetensors; README.md, the model card; train.csv,
  loss.png, results.json; run.json, logs/ with --log-with, and checkpoint/ while it runs. A run interrupted at
  any moment is continued by --resume, and on a CPU it ends with the same model byte for byte.
"""


@dataclass
class FinetuneArguments(TrainingArguments):
    """Options of `finetune`; each field is an option of the command.

    >>> FinetuneArguments(model="model", data="text.txt", output_dir="out", patch="elu1", lr=1e-3).max_steps
    1000
    """

    max_steps: int = option(1000, "updates of the weights", minimum=1)
    lr: float = option(1e-4, "peak learning rate", minimum=0)
    warmup: int | None = option(None, "steps of linear warm-up (default: 3 %% of --max-steps)", minimum=0)
    weight_decay: float = option(0.0, "the optimizer's weight decay", minimum=0)
    max_grad_norm: float = option(1.0, "clip the gradient to this norm; 0 does not clip", minimum=0)
    lora: int = option(
        0, "rank of LoRA on all linear layers; the patch's own parameters train in full", minimum=0
    )
    lora_alpha: int | None = option(None, "LoRA's scale times its rank (default: twice the rank)", minimum=1)
    train_only_patch: bool = option(False, "train the patch's parameters and freeze everything else")
    context_parallel: int = option(
        1, "processes that share each row, a part of its tokens each (see below)", minimum=1
    )

    def __post_init__(self) -> None:
        """Check values and fill in what depends on other options.

        Raises:
            OptionError: a value out of its bounds, or options that exclude or need each other.
        """
        super().__post_init__()
        if self.lora and self.train_only_patch:
            raise OptionError("--lora and --train-only-patch exclude each other")
        if self.lora_alpha is not None and not self.lora:
            raise OptionError("--lora-alpha scales LoRA: give --lora, its rank, or leave it out")
        if self.block_size % self.context_parallel or self.block_size < 2 * self.context_parallel:
            raise OptionError(
                f"--block-size {self.block_size} cannot be split into {self.context_parallel} equal parts of "
                f"at least 2 tokens: take a multiple of --context-parallel {self.context_parallel}"
            )
        if self.patch == "none":
            self.patch = None
        if self.options and self.patch is None:
            raise OptionError("--options belong to a --patch, and none is given")
        if self.warmup is None:
            self.warmup = math.ceil(0.03 * self.max_steps)
        elif self.warmup > self.max_steps:
            raise OptionError(
                f"--warmup {self.warmup} is longer than --max-steps {self.max_steps}: the rate of --lr would "
                "never be reached"
            )


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command, with one option per field of `FinetuneArguments`."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_linattn.finetune",
        description="Fine-tune a language model or encoder, its attention patched or not, on plain text.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, FinetuneArguments)
    return parser
