"""Every causal language model of transformers against the oracle, and the table docs/families.md.

    python tests/families.py --write docs/families.md          all types
    python tests/families.py --only llama,mistral --jobs 2     some, printed

Each type gets a tiny random model (`family_models`), and each patch is compared with `oracle.py` on the same
model (`family_checks`). `test_families.py` runs a subset of the types, and encoders,
encoder-decoders and multimodal models.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import re
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from helpers.family_checks import CUTS, HYBRID, LINEAR, OPTIONS, PATCHES, Result, _good, check_causal
from helpers.family_configs import LENGTH, PAD, WINDOW, first_line
from helpers.family_models import Slow
from tqdm import tqdm
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LM

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 400  # for one type on a busy machine


# ---------------------------------------------------------------------------------------------- the command


def _limited(job: tuple[str, str]) -> Result:
    name, folder = job
    path = Path(folder) / f"{name}.json"
    if path.exists():
        return Result(**json.loads(path.read_text()))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()

    def stop(*_: Any) -> None:
        raise Slow(f"took longer than {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        result = check_causal(name)
    except Slow as error:
        result = Result(name, reason=str(error))
    except Exception as error:
        traceback.print_exc()
        result = Result(name, status="wrong", reason=first_line(error))
    finally:
        signal.alarm(0)
    path.write_text(json.dumps(asdict(result)))
    return result


def _state_folder() -> Path:
    """Results of an interrupted run, valid for these very sources and versions."""
    digest = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for folder in ("hf_linattn", "patches", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if folder != "tests" or path.stem.startswith("famil") or path.name == "oracle.py":
                digest.update(path.read_bytes())
    return Path(tempfile.gettempdir()) / f"hf_linattn-families-{digest.hexdigest()[:16]}"


def main(argv: list[str] | None = None) -> int:
    """Run the check and print or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the table there instead of printing results"
    )
    parser.add_argument("--only", help="types, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--state", type=Path, help="folder of results so far; default: by the sources' checksum"
    )
    arguments = parser.parse_args(argv)
    names = arguments.only.split(",") if arguments.only else sorted(CAUSAL_LM)
    if strange := [name for name in names if name not in CAUSAL_LM]:
        parser.error(f"no causal type {strange[0]!r}")
    if arguments.write and arguments.only:
        parser.error("--write takes all types")
    folder = arguments.state or _state_folder()
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(name, str(folder)) for name in names]
    results = []
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for result in tqdm(pool.imap_unordered(_limited, jobs), total=len(jobs), file=sys.stderr):
            results.append(result)
            if not arguments.write:
                tqdm.write(summary(result), file=sys.stdout)
    results.sort(key=lambda result: result.name)
    print(dict(Counter(result.status for result in results)))
    if arguments.write:
        arguments.write.write_text(document(results))
    return int(any(result.status == "wrong" for result in results))


def summary(result: Result) -> str:
    """One line for the terminal."""
    values = {k: f"{v:.0e}" if isinstance(v, float) else v[:90] for k, v in result.patches.items()}
    cached = {k: f"{v:.0e}" if isinstance(v, float) else v[:90] for k, v in result.cache.items()}
    own = f"{result.own_cache:.0e}" if isinstance(result.own_cache, float) else result.own_cache
    return (
        f"{result.name}: {result.status} {result.reason} {result.dtype} {values} cache {cached} (own {own}) "
        f"modules {result.modules} {result.untouched or ''}"
    )


REASON = re.compile(r"\) (?:at )?(.*?)(?: \('|, which|, and a cache|: one state|$)")
HEAD = """# Families

Every causal language model type of transformers {transformers}, {count} in all, with each patch.
{command}

{counts}

## How it was checked

One tiny random model of each type (weights scaled to std 0.2, {length} tokens in 2 rows, one padded at the
left by {pad} tokens, windows of {window}, float64 unless said otherwise), on the CPU with torch {torch}:

* **oracle**: `tests/helpers/oracle.py` computes the patch's formula in float64, N x N, on the same
  unpatched model.
  *Right* means that the largest difference of logits is below 1e-7 of the largest logit (1e-4 in float32
  models). The oracle must also agree with the model's own attention when it computes softmax. Largest
  difference in float64: {worst}.
* **unpatching**: bit-identical logits, the same state_dict keys, config, hooks and modules; also after a
  refusal.
* **with cache**: the same rows in chunks of {chunks} tokens through a cache equal the whole at once within
  1e-4. Where the unpatched model does not agree with itself there (marked *own*), the chunks are compared
  with the oracle's chunks.
* elu1 and `window+gated` run with `sliding="global"` and must drop windows; softmax1 and logn must honour
  them.
* `window+gated` has a window of {hybrid[size]} tokens and {hybrid[sinks]} sinks, in the modules that look
  back alone: not in encoders and cross-attention. Sinks stand where the text has them (`positions="text"`).
  `pytest tests/patches/test_window_rotary.py` shows which models turn them inside the cache, and how.
* *adapter*: the type has attention code of its own, which an adapter (hf_linattn/patching/adapters) replaces
  while the model is patched. The oracle runs on the same adapter, and its softmax must equal the type's code.
* *refused* means that `patch_model` raises with the reason before anything is touched, or, where the remark
  says so, that the first call raises. *not routed* means that no attention of the text goes through
  transformers' attention interface; the remark names its classes.

## What it does not show

Trained weights, long texts, half precision and GPUs. Vision and audio towers were built, but did not run:
`pytest tests/patching/test_multimodal.py` runs nine types with an image in the prompt, and
`pytest tests/patching/test_sounds.py` six with a sound, Whisper and Moonshine beside them. A model may hold
other attentions beside those that route; the remark names them, and the oracle cannot see them either.
Timestamps of words by Whisper read the weights of `eager` attention, which `generate` then sets by itself:
`NotPatchedError`. Remote code is not covered. "Right" says that the formula is computed, not that a model is
any good with it.

## Types

| type | elu1 | softmax1 | logn | window+gated | with cache | remark |
|---|---|---|---|---|---|---|
"""


def document(results: list[Result]) -> str:
    """docs/families.md."""
    worst = max(
        v for r in results if r.dtype == "float64" for v in r.patches.values() if isinstance(v, float)
    )
    counts = {
        "right with every patch": [r for r in results if r.status == "right"],
        "refused by some patch": [r for r in results if r.status == "refused"],
        "not routed": [r for r in results if r.status == "not routed"],
        "not built": [r for r in results if r.status == "not built"],
        "wrong": [r for r in results if r.status == "wrong"],
    }
    lines = ["| | types |", "|---|---|", *(f"| {name} | {len(rows)} |" for name, rows in counts.items())]
    cached = [r for r in results if any(isinstance(value, float) for value in r.cache.values())]
    good = [r for r in cached if all(_good(value) for value in r.cache.values())]
    lines += [f"| right with a cache too | {len(good)} |"]
    head = HEAD.format(
        transformers=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        count=len(results),
        command="Made by `python tests/families.py --write docs/families.md`.",
        counts="\n".join(lines),
        hybrid=OPTIONS[HYBRID],
        length=LENGTH,
        pad=PAD,
        window=WINDOW,
        worst=f"{worst:.0e}",
        chunks=", ".join(str(end - start) for start, end in pairwise(CUTS)),
    )
    return head + "".join(_row(result) for result in results)


def _row(result: Result) -> str:
    cells = []
    for patch in PATCHES:
        value = result.patches.get(patch)
        cells.append("" if value is None else "refused" if isinstance(value, str) else "right")
    if result.status in ("not routed", "not built"):
        cells = [result.status] * len(PATCHES)
    errors = list(result.cache.values())
    if not errors:
        cache = ""
    elif all(map(_good, errors)):
        cache = "right" if _good(result.own_cache) else "right (own)"
    else:
        cache = "none" if "no cache" in str(errors[0]) else "raises"
    return f"| {result.name} | {' | '.join(cells)} | {cache} | {_remark(result)} |\n"


def _remark(result: Result) -> str:
    remarks = []
    reasons: dict[str, list[str]] = {}
    for patch, value in result.patches.items():
        if isinstance(value, str):
            found = REASON.search(value)
            text = value if value.startswith("at the") or not found else found[1]
            reasons.setdefault(text, []).append(patch)
    remarks += [f"{', '.join(names)}: {text}" for text, names in reasons.items()]
    if result.status in ("not built", "wrong"):
        remarks.append(result.reason)
    elif result.status == "not routed" and "no adapter" not in result.reason:
        remarks.append(result.reason.partition("; ")[2] or result.reason)
    if result.untouched:
        remarks.append(
            f"beside it: {', '.join(result.untouched)}" if result.patches else ", ".join(result.untouched)
        )
    if result.adapted:
        remarks.append("adapter")
    kept = [patch for patch in LINEAR if result.sliding.get(patch) == "keep"]
    if kept:
        remarks.append(f"{', '.join(kept)} with sliding='keep': the model makes its windows' masks itself")
    ran, routed = result.modules
    if ran < routed and result.patches:
        remarks.append(f"{ran} of {routed} attention modules ran")
    if result.dtype == "float32":
        remarks.append("float32")
    failed = [value for value in result.cache.values() if isinstance(value, str) and "no cache" not in value]
    if failed:
        remarks.append(f"with a cache: {failed[0]}" + ("" if _good(result.own_cache) else " (unpatched too)"))
    return "; ".join(remarks).replace("|", "/").replace("*", "")


if __name__ == "__main__":
    sys.exit(main())
