"""The options that every training command has, as a dataclass that each command extends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hf_linattn.cli.arguments import MOST_SEED, check_values, option
from hf_linattn.errors import OptionError

FREE_TO_CHANGE = {
    *("output_dir", "resume", "overwrite", "cpu", "eval_data", "eval_split", "eval_every", "eval_blocks"),
    *("checkpoint_every", "batch_size", "grad_accum", "gradient_checkpointing", "log_with"),
    "context_parallel",
}
"""Options that a resumed run may change: none decides the weights (batches are compared as a whole)."""

HELD_OUT_ROWS = {"eval_data", "eval_split", "eval_blocks"}
"""Options that decide which rows validation reads."""


@dataclass
class TrainingArguments:
    """Options of a training command; each field is an option of the command line.

    Where the commands differ in a default or in what an option means, they declare the field again.
    """

    model: str = field(
        metadata={"help": "folder, Hub name or FILE.gguf of a language model or encoder, patched or not"}
    )
    data: str = field(
        metadata={"help": "text file, folder, .jsonl/.parquet/.csv, or dataset name (see below)"}
    )
    output_dir: str = field(metadata={"help": "where everything is written"})
    patch: str | dict[str, Any] | None = field(
        default=None,
        metadata={
            "help": "attention to install: a name, or JSON per layer (default, and none: leave the model as "
            "it is, patched or not)",
            "parse": "patch",
        },
    )
    options: dict[str, Any] | None = field(
        default=None, metadata={"help": "the patch's options as JSON", "parse": "json", "metavar": "JSON"}
    )
    sliding: Literal["keep", "global", "refuse"] = option(
        "keep", "sliding-window layers: see patch_model", choices=("keep", "global", "refuse")
    )
    objective: str = option(
        "auto", "what is predicted: next or masked tokens (see below)", choices=("auto", "causal", "mlm")
    )
    tokenizer: str | None = option(None, "folder or name of the tokenizer (default: the model's)")
    text_column: str = option("text", "column of a table or dataset that holds the text, or messages")
    data_split: str = option("train", "split of --data when it is a dataset name")
    streaming: bool = option(
        False, "read the text in order, and only as far as the run takes it (see below); always above 1 GiB"
    )
    block_size: int = option(512, "tokens per training row", minimum=2)
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
    min_lr_rate: float = option(
        0.1, "learning rate at the last step over the peak; a cosine between", minimum=0, maximum=1
    )
    no_dropout: bool = option(
        False, "switch all dropout off; that of attention is left out of linear patches anyway"
    )
    mixed_precision: str | None = option(
        None,
        "bf16 is faster on GPUs, and on CPUs that multiply it (AMX, AVX512-BF16); default: as accelerate is "
        "configured, else no",
        choices=("no", "bf16", "fp16"),
    )
    gradient_checkpointing: bool = option(
        False,
        "keep the inputs of layers alone, and compute layers again in the backward: less memory, slower",
    )
    compile: bool = option(
        False,
        "let torch.compile compile the layers: minutes at the start, then faster; not in stage transfer",
    )
    dtype: str = option("float32", "dtype of the weights", choices=("float32", "bfloat16"))
    seed: int = option(
        0, "decides new weights, the order of the data and dropout", minimum=0, maximum=MOST_SEED
    )
    eval_data: str | None = option(None, "text for the validation loss, as --data; start, every N steps, end")
    eval_split: str = option("validation", "split of --eval-data when it is a dataset name")
    eval_every: int = option(100, "steps between validations", minimum=1)
    eval_blocks: int = option(64, "blocks of --eval-data to use, from its start", minimum=1)
    patience: int = option(
        0,
        "stop after so many validations without a lower loss, and keep the weights of the best; "
        "0 goes on to --max-steps, and keeps the last",
        minimum=0,
    )
    checkpoint_every: int = option(
        100, "steps between checkpoints, ten minutes at most; only the latest is kept", minimum=1
    )
    log_with: Literal["tensorboard", "wandb", "trackio"] | None = option(
        None, "also send the rows of train.csv there", choices=("tensorboard", "wandb", "trackio")
    )
    resume: bool = option(False, "continue what is in --output-dir, or start when nothing is")
    overwrite: bool = option(False, "delete the run in --output-dir first")
    cpu: bool = option(False, "use the CPU even where there is a GPU")

    def __post_init__(self) -> None:
        """Check values as the command line does, so that both ways in refuse the same.

        Raises:
            OptionError: a value out of its bounds, or options that exclude or need each other.
        """
        check_values(self)
        if not isinstance(self.model, str):
            raise OptionError(f"model must be a folder or Hub name, not {type(self.model).__name__}")
        if self.output_dir == "":
            raise OptionError("--output-dir is empty")
        if self.options is not None and not isinstance(self.options, dict):
            raise OptionError(f"options must be a dict, got {self.options!r}; the command line takes JSON")
        if self.resume and self.overwrite:
            raise OptionError("--resume and --overwrite exclude each other")
        if self.patience and self.eval_data is None:
            raise OptionError("--patience watches the validation loss: give --eval-data")
