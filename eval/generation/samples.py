"""What models write: the same prompts continued by each, greedily or at random."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hf_linattn import describe
from hf_linattn.cli.files import write_json
from hf_linattn.errors import DataError, LinattnError
from hf_linattn.ops.dispatch import kernels
from hf_linattn.patching.causality import require_causal

from ..common.models import ModelSpec, load_model, load_tokenizer, set_seed
from ..common.nll import explained_failures, nan_refused, scoring
from ..common.results import default_device, versions

FORMAT = "hf_linattn.samples/1"
MEMORY = "out of memory: take a shorter --prompt, fewer --new-tokens, --dtype bfloat16 or a smaller model"
SHOWN = 600
"""Characters from the end of a prompt that the text on stdout shows."""


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
        model: a causal language model; left unchanged.
        tokenizer: its tokenizer.
        prompts: texts to continue.
        name: `Sample.model`.
        max_new_tokens: tokens to write at most; an end-of-text token ends earlier.
        temperature: of random continuations; None is greedy.
        samples: continuations per prompt.
        seed: of the random choices, the same for every prompt.

    Raises:
        DataError: a prompt has no tokens, or the model's logits hold NaN.
        UnsupportedModelError: the model does not continue texts, or its table of positions ends before the
            prompt does.
    """
    require_causal(model)
    choice: dict[str, Any] = {"do_sample": False}
    if temperature is not None:
        choice = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}

    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    written = []
    with scoring(model):
        for index, prompt in enumerate(prompts):
            ids = torch.tensor([tokenizer(prompt, verbose=False)["input_ids"]], dtype=torch.long)
            if ids.numel() == 0:
                raise DataError(f"prompt {index + 1} holds no text")
            ids = ids.to(next(model.parameters()).device)
            set_seed(seed)
            for _ in range(samples):
                start = time.perf_counter()
                with explained_failures(model, ids, ids.shape[1] + max_new_tokens, MEMORY):
                    out = model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        max_new_tokens=max_new_tokens,
                        pad_token_id=pad,
                        logits_processor=[nan_refused(model)],
                        **choice,
                    )[0, ids.shape[1] :]
                seconds = round(time.perf_counter() - start, 3)
                text = tokenizer.decode(out, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                written.append(Sample(name, index, ids.shape[1], len(out), text, seconds))
    return written


def state_of(model: Any) -> dict[str, Any]:
    """Tell what a sequence costs in memory: bytes of constant states, and bytes that each token adds."""
    try:
        rows = [row for row in describe(model) if not row.tower]
    except LinattnError:  # no attention that could be patched, as in a state-space model
        return {}
    if any(row.state_bytes is None and row.bytes_per_token is None for row in rows):
        return {}
    return {
        "state_bytes": sum(row.state_bytes or 0 for row in rows),
        "bytes_per_token": sum(row.bytes_per_token or 0 for row in rows),
        "patches": sorted({row.patch for row in rows}),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def run(args: argparse.Namespace, command: str) -> str:
    """Load one model after the other and let it write; the texts come back, by prompt.

    Raises:
        LinattnError: a prompt or a model cannot be used.
    """
    prompts = [*args.prompt, *map(_read, args.prompt_file)]
    device = str(default_device())
    samples: list[dict[str, Any]] = []
    models: list[dict[str, Any]] = []
    settings = {name: getattr(args, name) for name in ("temperature", "samples", "seed")}
    settings["max_new_tokens"] = args.new_tokens
    for name in dict.fromkeys(args.model):
        tokenizer = load_tokenizer(args.tokenizer or name)
        model = load_model(ModelSpec(name, name), dtype=args.dtype, device=device)
        models.append({"model": name, **state_of(model)})
        samples += map(asdict, generate(model, tokenizer, prompts, name=name, **settings))
    results = {
        "format": FORMAT,
        "command": command,
        "seed": args.seed,
        "temperature": args.temperature,
        "versions": versions(),
        "device": device,
        "kernels": kernels(),
        "models": models,
        "prompts": prompts,
        "samples": samples,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.output, results)
    lines = []
    for index, prompt in enumerate(prompts):
        lines.append(f"prompt {index + 1}: {'...' if len(prompt) > SHOWN else ''}{prompt[-SHOWN:]}")
        for sample in samples:
            if sample["prompt"] == index:
                lines += ["", f"[{sample['model']}] {json.dumps(sample['text'], ensure_ascii=False)}"]
        lines.append("")
    return "\n".join([*lines, f"written to {args.output}"])


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the prompt {path}: {error}") from error
