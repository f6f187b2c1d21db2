"""Perplexity against length: does more context help or hurt?

python -m hf_linattn.eval.perplexity --model DIR --data book.txt --lengths 512,...,8192 --output-dir out
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any, Literal

from hf_linattn.cli.main import exit_status
from hf_linattn.errors import OptionError

from ..common.cli import checked, doubling, parse_options, parse_rope_scaling, whole
from ..common.entries import entry_curves, parse_entries

LENGTHS = "512,1024,2048,4096"
EPILOG = """\
examples (`perplexity` stands for `python -m hf_linattn.eval.perplexity`):
  # does more context help? The same tokens, read with 512, 1024, ... 65536 tokens of context
  perplexity --model DIR --data books/ --lengths 512,...,65536 --output-dir out

  # a patch before any training, beside the weights as they are
  perplexity --model DIR --patch elu1 --baseline unpatched --data book.txt --output-dir out
  perplexity --model DIR --patch logn --options '{"train_length": 512}' --data book.txt --output-dir out2

  # a fine-tuned folder beside its original; the original with its RoPE scaled, in a folder of its own
  perplexity --model tuned --baseline original --data books/ --output-dir out/tuned
  perplexity --model original --rope-scaling yarn:8 --data books/ --output-dir out/yarn

  # many patches of one model side by side: an entry is PATCH[:OPTION=VALUE...][@KIND:FACTOR]
  perplexity --model DIR --data books/ --lengths 512,...,8192 --output-dir out \\
      --compare softmax,softmax@yarn:8,softmax1,logn:train_length=1024,softmax1+logn:kappa=0.2:clip=true

  # plain perplexity: windows side by side, all tokens scored
  perplexity --model DIR --data book.txt --lengths 512 --stride full --max-tokens all --output-dir out

  # a million tokens in constant memory: linear attention only, its state carried through the document
  perplexity --model linear --data books/ --join --stream --max-tokens all --output-dir out

  # several processes share the windows; the sums are the same to the last bit
  accelerate launch --num_processes 2 -m hf_linattn.eval.perplexity --model DIR --data books/ --output-dir out

The folder gets results.json, results.csv and perplexity.png. results.json is renewed after every length: the
same command goes on where it stopped. docs/perplexity.md says what exactly is measured.
"""


def _stride(text: str) -> int | Literal["full"]:
    return "full" if text == "full" else whole(text)


def _budget(text: str) -> int | Literal["all"]:
    return "all" if text == "all" else whole(text)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_linattn.eval.perplexity",
        description="Perplexity per token and per byte at several lengths of context, on the same tokens.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="folder or name of a causal language model, patched or not")
    add("--tokenizer", help="folder or name of the tokenizer (default: the model's)")
    add("--data", required=True, help="text file, folder, .jsonl/.json/.parquet/.csv, or a dataset's name")
    add("--column", default="text", help="text column of a table (default: %(default)s)")
    add("--split", default="train", help="split of a dataset given by name (default: %(default)s)")
    add("--lengths", type=doubling, help=f"tokens per window; '...' doubles (default: {LENGTHS})")
    add(
        "--stride", type=_stride, help="score the last STRIDE tokens of each window, or 'full' (default: 256)"
    )
    add(
        "--max-tokens",
        type=_budget,
        default=65536,
        help="scored tokens per length, or 'all' (default: %(default)s)",
    )
    add("--batch-size", type=whole, help="windows per forward pass (default: 1)")
    bos_help = "BOS before each document: as the tokenizer does, yes, no; or at the start of every window"
    add("--bos", choices=("auto", "yes", "no", "window"), default="auto", help=bos_help)
    add("--join", action="store_true", help="join the documents, in order, into one")
    add("--stream", action="store_true", help="read documents whole, carrying the state of linear attention")
    add("--segment", type=whole, help="tokens per step of --stream (default: 4096)")
    add("--patch", help="patch to try on the loaded model, such as elu1")
    add("--options", type=checked(parse_options), help="options of --patch as JSON")
    rope_help = "linear, dynamic or yarn, as transformers has them; not for baselines"
    rope_type = checked(parse_rope_scaling, keep=True)
    add("--rope-scaling", type=rope_type, metavar="KIND:FACTOR", help=rope_help)
    compare_help = (
        "curves of this one model, by comma: a patch or composition ('softmax' is the model's own "
        "attention), its options, and @KIND:FACTOR for scaled RoPE (see the examples); repeatable"
    )
    add("--compare", type=checked(parse_entries), action="extend", metavar="ENTRIES", help=compare_help)
    baseline_help = "another model, or 'unpatched': the same without --patch and --rope-scaling; repeatable"
    add("--baseline", action="append", default=[], metavar="MODEL", help=baseline_help)
    add("--train-length", type=whole, help="length to mark in the plot (default: from the configuration)")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="(default: as saved)",
    )
    add("--seed", type=int, default=0, help="for patches with random parameters (default: %(default)s)")
    add(
        "--output-dir",
        type=Path,
        required=True,
        help="folder for the results; the same command resumes there",
    )
    return parser


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse, and refuse combinations in which an argument would do nothing."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.compare:
        _check_compare(parser, args)
    if args.options is not None and args.patch is None:
        parser.error("--options belongs to --patch")
    unused = ("lengths", "stride", "batch_size") if args.stream else ("segment",)
    for name in unused:
        if getattr(args, name) is not None:
            parser.error(
                f"--{name.replace('_', '-')} has no meaning {'with' if args.stream else 'without'} --stream"
            )
    if args.stream and "unpatched" in args.baseline:
        parser.error("--stream needs linear attention, which --baseline unpatched has not")
    if args.stream and args.bos == "window":
        parser.error("--bos window has no meaning with --stream")
    if args.lengths is None:
        args.lengths = doubling(LENGTHS)
    for name, value in (("stride", 256), ("batch_size", 1), ("segment", 4096), ("options", {})):
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def _check_compare(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """What else belongs into the entries of --compare."""
    instead = {
        "patch": f"--compare {','.join(args.compare)},{args.patch}",
        "options": "--compare logn:train_length=1024",
        "rope_scaling": f"--compare softmax@{args.rope_scaling}",
    }
    for name, entry in instead.items():
        if getattr(args, name) is not None:
            parser.error(f"--{name.replace('_', '-')} has no meaning with --compare: write {entry}")
    if "unpatched" in args.baseline:
        parser.error("--baseline unpatched has no meaning with --compare: its name there is softmax")
    try:
        entry_curves(args.compare, args.model)
    except OptionError as error:
        parser.error(str(error))


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    command = shlex.join(["python", "-m", "hf_linattn.eval.perplexity", *argv])
    process = int(os.environ.get("RANK", "0"))

    def work() -> None:
        from hf_linattn.cli.main import start_missing_processes

        from .run import run

        start_missing_processes("hf_linattn.eval.perplexity", argv)
        _quiet_libraries(process)
        results = run(args, command)
        if process == 0:
            print(_summary(results, args))

    told = "the same command goes on after the last finished length"
    return exit_status(work, interrupted=told, process=process, alike=True)


def _quiet_libraries(process: int) -> None:
    """Leave the terminal to our own bar; of other processes than the first show errors only."""
    import datasets
    import transformers

    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    if process > 0:
        datasets.logging.set_verbosity_error()
        transformers.utils.logging.set_verbosity_error()


def _summary(results: dict[str, Any], args: argparse.Namespace) -> str:
    """The table and the sentences one needs to read it."""
    from .tables import curve_table, overall, table

    rows, data = results["rows"], results["data"]
    lines = [curve_table(rows) if args.compare else table(rows)]
    if args.stream:
        lines.append("length: end of a position bucket; the context is all of the document before a token")
        for label in dict.fromkeys(row["model"] for row in rows):
            lines.append(f"{label}, all positions: {overall([r for r in rows if r['model'] == label]):.5g}")
    elif args.stride == "full":
        lines.append("windows side by side; all tokens but the first of each window are scored")
    else:
        lines.append(f"the same tokens at every length: the last {args.stride} of each window")
    if "documents_long_enough" in data:
        lines.append(f"{data['documents_long_enough']} of {data['documents']} documents are long enough")
    lines.append(f"stderr over {rows[0]['stderr_over']}; results.json, .csv and a plot in {args.output_dir}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
