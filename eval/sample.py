"""What models write: the same prompts continued by each, side by side.

python -m hf_linattn.eval.sample --model DIR --prompt "def main(" --greedy --output samples.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_linattn.cli.main import exit_status
from hf_linattn.errors import DataError, LinattnError

FORMAT = "hf_linattn.samples/1"
SHOWN = 600
"""Characters from the end of a prompt that the table on stdout shows."""

EPILOG = """\
examples (`sample` stands for `python -m hf_linattn.eval.sample`):
  sample --model DIR --prompt "Once upon a time" --greedy --output samples.json
  # a model beside its original, a long prompt from a file, three random continuations
  sample --model tuned --model original --prompt-file chapter.txt --temperature 0.8 --samples 3 \\
      --output samples.json
"""


@dataclass(frozen=True)
class Sample:
    """One continuation.

    Attributes:
        model: folder or name of the model.
        prompt: index of the prompt.
        prompt_tokens, new_tokens: tokens read and written.
        text: what was written.
        seconds: reading and writing together.
    """

    model: str
    prompt: int
    prompt_tokens: int
    new_tokens: int
    text: str
    seconds: float


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    name: str = "",
    max_new_tokens: int = 120,
    temperature: float | None = None,
    samples: int = 1,
    seed: int = 0,
) -> list[Sample]:
    """Continue each prompt.

    Args:
        model: a causal language model; left as it is found.
        tokenizer: its tokenizer.
        prompts: texts to continue.
        name: `Sample.model`.
        max_new_tokens: tokens to write at most; an end-of-text token ends earlier.
        temperature: of random continuations; None is greedy.
        samples: continuations per prompt.
        seed: of the random choices, the same for every prompt.

    Raises:
        DataError: a prompt has no tokens.
    """
    import torch
    from transformers import set_seed

    from .common.nll import scoring

    how: dict[str, Any] = {"do_sample": False}
    if temperature is not None:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    found = []
    with scoring(model):
        for index, prompt in enumerate(prompts):
            ids = torch.tensor([tokenizer(prompt, verbose=False)["input_ids"]], dtype=torch.long)
            if ids.numel() == 0:
                raise DataError(f"prompt {index + 1} holds no text")
            ids = ids.to(next(model.parameters()).device)
            set_seed(seed)
            for _ in range(samples):
                start = time.perf_counter()
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=max_new_tokens,
                    pad_token_id=pad,
                    **how,
                )[0, ids.shape[1] :]
                seconds = round(time.perf_counter() - start, 3)
                text = tokenizer.decode(out, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                found.append(Sample(name, index, ids.shape[1], len(out), text, seconds))
    return found


def state_of(model: Any) -> dict[str, Any]:
    """What a sequence costs in memory: bytes of constant states, and bytes that each token adds."""
    from hf_linattn import describe

    try:
        rows = list(describe(model))
    except LinattnError:  # no attention that could be patched, as in a state-space model
        return {}
    known = all(row.state_bytes is not None or row.bytes_per_token is not None for row in rows)
    if not known:
        return {}
    return {
        "state_bytes": sum(row.state_bytes or 0 for row in rows),
        "bytes_per_token": sum(row.bytes_per_token or 0 for row in rows),
        "patches": sorted({row.patch for row in rows}),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_linattn.eval.sample",
        description="Let models, patched or not, continue the same prompts.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", action="append", required=True, help="folder or name of a causal model; repeatable")
    add("--tokenizer", help="folder or name of the tokenizer (default: each model's own)")
    add("--prompt", action="append", default=[], help="text to continue; repeatable")
    add("--prompt-file", action="append", default=[], type=Path, help="file with a prompt; repeatable")
    add("--max-new-tokens", type=_count, default=120, help="tokens to write (default: %(default)s)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--greedy", action="store_true", help="always the likeliest token (the default)")
    how.add_argument("--temperature", type=_temperature, help="draw tokens at this temperature")
    add("--samples", type=_count, default=1, help="continuations per prompt (default: %(default)s)")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="(default: as saved)",
    )
    add("--seed", type=int, default=0, help="of random continuations (default: %(default)s)")
    add("--output", type=Path, required=True, help="JSON file for the result")
    return parser


def run(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Load one model after the other and let it write; the content of the file comes back.

    Raises:
        LinattnError: a prompt or a model cannot be used.
    """
    import torch

    from hf_linattn.cli.files import write_json

    from .common.models import Curve, load_model, load_tokenizer
    from .common.results import versions

    prompts = [*args.prompt, *map(_read, args.prompt_file)]
    if not prompts:
        raise DataError("nothing to continue: give --prompt or --prompt-file")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    samples: list[dict[str, Any]] = []
    models: list[dict[str, Any]] = []
    for name in dict.fromkeys(args.model):
        tokenizer = load_tokenizer(args.tokenizer or name)
        model = load_model(Curve(name, name), dtype=args.dtype, device=device)
        models.append({"model": name, **state_of(model)})
        found = generate(
            model,
            tokenizer,
            prompts,
            name=name,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            samples=args.samples,
            seed=args.seed,
        )
        samples += map(asdict, found)
    results = {
        "format": FORMAT,
        "command": command,
        "seed": args.seed,
        "temperature": args.temperature,
        "versions": versions(),
        "device": device,
        "models": models,
        "prompts": prompts,
        "samples": samples,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.output, results)
    return results


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    args = build_parser().parse_args(argv)
    command = shlex.join(["python", "-m", "hf_linattn.eval.sample", *argv])

    def work() -> None:
        from transformers.utils import logging

        logging.disable_progress_bar()
        results = run(args, command)
        for index, prompt in enumerate(results["prompts"]):
            print(f"prompt {index + 1}: {'...' if len(prompt) > SHOWN else ''}{prompt[-SHOWN:]}")
            for sample in results["samples"]:
                if sample["prompt"] == index:
                    print(f"\n[{sample['model']}] {json.dumps(sample['text'], ensure_ascii=False)}")
            print()
        print(f"written to {args.output}")

    return exit_status(work, interrupted="nothing was written")


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the prompt {path}: {error}") from error


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}; for 0 use --greedy")
    return value


if __name__ == "__main__":
    sys.exit(main())
