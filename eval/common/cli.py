"""The frame of an evaluation command: the options that several have, types for argparse, and its end."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from hf_linattn.cli.arguments import argparse_type as argparse_type
from hf_linattn.cli.arguments import json_object as json_object
from hf_linattn.cli.arguments import positive_int as positive_int
from hf_linattn.cli.arguments import positive_ints as positive_ints
from hf_linattn.cli.arguments import seed as seed_type
from hf_linattn.cli.main import exit_status
from hf_linattn.errors import OptionError

ROPE_SCALINGS = ("linear", "dynamic", "yarn")
DTYPES = ("auto", "float32", "bfloat16", "float16")
RESUMES = "folder for the results; the same command resumes there"


def command_parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Make the parser of `python -m hf_linattn.eval.NAME`, its epilog printed as it is."""
    return argparse.ArgumentParser(
        prog=f"python -m hf_linattn.eval.{name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_model_arguments(
    parser: argparse.ArgumentParser,
    model: str | None = "folder, name or FILE.gguf of a causal language model, patched or not",
    *,
    tokenizer: str | None = "the model's",
    patch: str | None = None,
    dtype: str = "auto",
    dtypes: Sequence[str] = DTYPES,
    seed: str = "for patches with random parameters",
    default_seed: int = 0,
) -> None:
    """Add --model, --tokenizer, --patch, --options, --dtype and --seed.

    Args:
        parser: of the command.
        model: help of --model; None leaves it to the command.
        tokenizer: whose tokenizer is the default; None for no such option.
        patch: help of --patch, whose options are --options; None for neither.
        dtype: default of --dtype.
        dtypes: its choices.
        seed: what the seed is for.
        default_seed: default of --seed.
    """
    add = parser.add_argument
    if model is not None:
        add("--model", required=True, help=model)
    if tokenizer is not None:
        add("--tokenizer", help=f"folder or name of the tokenizer (default: {tokenizer})")
    if patch is not None:
        add("--patch", help=patch)
        add("--options", type=argparse_type(json_object), help="options of --patch as JSON")
    default = "as saved" if dtype == "auto" else "%(default)s"
    add("--dtype", choices=dtypes, default=dtype, help=f"of the model's weights (default: {default})")
    add("--seed", type=seed_type, default=default_seed, help=f"{seed} (default: %(default)s)")


def add_text_arguments(
    parser: argparse.ArgumentParser, *, required: bool = True, data: str = "text", window_bos: bool = True
) -> None:
    """Add --data, --column, --split, --join and --bos.

    Args:
        parser: of the command.
        required: whether --data must be there.
        data: what --data is, in its help.
        window_bos: whether BOS can begin every window.
    """
    add = parser.add_argument
    kinds = "file, folder, .jsonl/.json/.parquet/.csv, or a dataset's name"
    add("--data", required=required, help=f"{data}: {kinds}")
    add("--column", "--text-column", default="text", help="text column of a table (default: %(default)s)")
    add("--split", "--data-split", default="train", help="split of a named dataset (default: %(default)s)")
    add("--join", action="store_true", help="join the documents, in order, into one")
    bos = "BOS before each document: as the tokenizer does, yes, no"
    choices = ["auto", "yes", "no", *(["window"] if window_bos else [])]
    bos += "; or at the start of every window" if window_bos else ""
    add("--bos", choices=choices, default="auto", help=f"{bos} (default: %(default)s)")


def add_output_arguments(
    parser: argparse.ArgumentParser, *, required: bool = True, what: str = RESUMES
) -> None:
    """Add --output-dir."""
    parser.add_argument("--output-dir", type=_folder, required=required, help=what)


def check_options_have_patch(args: Any) -> Any:
    """Refuse --options without --patch; the arguments come back.

    Raises:
        OptionError: there are options and no patch.
    """
    if args.options is not None and args.patch is None:
        raise OptionError("--options belongs to --patch")
    return args


def refuse_options(args: Any, names: Sequence[str], where: str) -> None:
    """Refuse options that would do nothing, such as those that have no meaning "without --stream".

    Raises:
        OptionError: one of them is there, and neither empty nor 0.
    """
    for name in names:
        if getattr(args, name):
            raise OptionError(f"--{name.replace('_', '-')} has no meaning {where}")


def run_command(
    parser: argparse.ArgumentParser,
    work: Callable[[Any, str], str | None],
    argv: Sequence[str] | None = None,
    *,
    check: Callable[[argparse.Namespace], Any] = lambda args: args,
    needs: str = "eval",
    interrupted: str = "nothing was written",
    share_work: bool = False,
) -> int:
    """Run a command; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted.

    Args:
        parser: of the command; its `prog` says how it is called.
        work: gets the arguments and the command line as text, and returns what is printed at the end. What
            takes time to import belongs inside.
        argv: words of the command line; None for this process's own.
        check: turns what was parsed into the arguments of `work`; an `OptionError` of it is wrong usage.
        needs: extra of this package that installs what the command needs.
        interrupted: what the user should know after Ctrl-C.
        share_work: several processes share the work, started by `accelerate launch` or torchrun.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        arguments = check(parser.parse_args(argv))
    except OptionError as error:
        parser.error(str(error))
    process = int(os.environ.get("RANK", "0"))

    def do() -> None:
        from transformers.utils import logging

        from hf_linattn.cli.main import quiet_libraries, start_missing_processes

        if share_work:
            start_missing_processes(parser.prog.split()[-1], argv)
        logging.disable_progress_bar()
        if process > 0:
            quiet_libraries(process)
        text = work(arguments, shlex.join([*parser.prog.split(), *argv]))
        if process == 0 and text is not None:
            print(text)

    return exit_status(do, interrupted=interrupted, extra=needs, process=process, alike=True)


def parse_rope_scaling(text: str) -> tuple[str, float]:
    """Parse a RoPE scaling: `yarn:4` -> ("yarn", 4.0).

    Raises:
        OptionError: the kind is unknown, or the factor is no number of at least 1.
    """
    kind, _, number = text.partition(":")
    if kind not in ROPE_SCALINGS:
        raise OptionError(f"unknown RoPE scaling {kind!r}; known: {', '.join(ROPE_SCALINGS)}, as KIND:FACTOR")
    factor = parse_float(number)
    if not 1 <= factor < float("inf"):
        raise OptionError(f"RoPE scaling {text!r}: the factor must be a number of at least 1, as in {kind}:4")
    return kind, factor


def parse_float(text: str) -> float:
    """Parse a number; NaN, which lies in no range, for everything else."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def natural_int(text: str) -> int:
    """Parse a whole number of at least 0."""
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, got {text!r}")
    return int(text)


def _folder(text: str) -> Path:
    """Parse the name of a folder; an empty one would be the folder one is in."""
    if not text:
        raise argparse.ArgumentTypeError("the name of the folder is empty")
    return Path(text)


def token_budget(text: str) -> int | Literal["all"]:
    """Parse a number of tokens, or "all"."""
    return "all" if text == "all" else positive_int(text)


def doubling_range(text: str) -> list[int]:
    """Parse lengths, doubling them at dots: `512,...,4096` -> [512, 1024, 2048, 4096]."""
    parts = text.split(",")
    lengths: list[int] = []
    for index, part in enumerate(parts):
        if part.strip() in ("...", "…"):
            if not lengths or index + 1 == len(parts):
                raise argparse.ArgumentTypeError(
                    f"'...' stands between two lengths, as in 512,...,8192: {text!r}"
                )
            while lengths[-1] * 2 < positive_int(parts[index + 1]):
                lengths.append(lengths[-1] * 2)
        else:
            lengths.append(positive_int(part))
    return lengths


def names_of(known: Sequence[str], what: str, none: str | None = None) -> Callable[[str], list[str]]:
    """Make a type of argparse for names by comma, each once; without known ones anything goes.

    Errors call a name `what`, and the word `none` stands for an empty list.
    """

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if none is not None and names == [none]:
            return []
        if not all(names):
            raise argparse.ArgumentTypeError(f"expected names by comma, got {text!r}")
        for name in names:
            if known and name not in known:
                raise argparse.ArgumentTypeError(f"unknown {what} {name!r}; known: {', '.join(known)}")
        return list(dict.fromkeys(names))

    return parse
