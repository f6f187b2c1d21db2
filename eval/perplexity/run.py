"""The measurement behind the perplexity command: texts and models in, rows and files out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_linattn.cli.files import replacing
from hf_linattn.errors import DataError, OptionError
from hf_linattn.parallel import Shard, check_length, lost_processes
from hf_linattn.patching.causality import require_causal
from hf_linattn.patching.splitting import split_rows

from ..common.model_specs import ModelLoader, error_prefix, is_reference, refuse_growing_cache
from ..common.models import ModelSpec, load_texts, load_tokenizer, train_length
from ..common.results import ResumableRun, default_device
from ..common.windows import Plan, Texts, encode, plan_windows
from .arguments import PerplexityArguments
from .branches import FORMAT as BRANCHES_FORMAT
from .branches import sentences, use_each, window_sizes
from .measure import score_length, score_stream
from .plot import COLUMNS, save_plot

FORMAT = "hf_linattn.perplexity/1"


Use = Callable[[], AbstractContextManager[nn.Module]]
"""Gives the model of a curve while it is measured."""


def perplexity(arguments: PerplexityArguments, command: str | None = None) -> dict[str, Any]:
    """Measure all curves that are missing and write all files; return the content of results.json.

    In several processes every one must call it; the first one writes.

    Args:
        arguments: the options of the command.
        command: how the run was started, for the record; by default the call from Python.

    Raises:
        DataError: the text is missing or too short, or the folder holds another run.
        OptionError: an argument does not suit the model.
        UnsupportedModelError: the model sees later tokens, or has no hybrid for `branches`.
        LinattnError: the model or a patch does not suit.
    """
    from accelerate import PartialState

    # torchrun on a machine without accelerator: only cpu=True makes its processes one group
    state = PartialState(cpu=default_device().type == "cpu")
    with lost_processes(state.process_index, state.num_processes):
        results = _run(arguments, command or f"perplexity({arguments!r})", state)
        # a process that ended while the first still draws the plot would sometimes abort on its way out
        state.wait_for_everyone()
    state.destroy_process_group()
    return results


def _run(arguments: PerplexityArguments, command: str, state: Any) -> dict[str, Any]:
    run = ResumableRun(
        arguments.output_dir,
        arguments.recorded(),
        BRANCHES_FORMAT if arguments.branches else FORMAT,
        command,
        device=state.device,
        writes=state.is_main_process,
    )
    state.wait_for_everyone()  # before anyone writes
    picture = "branches.png" if arguments.branches else "perplexity.png"
    if run.complete:
        if run.lacks(picture):
            _draw(arguments.output_dir / picture, arguments, run.results)
        return run.results
    shard = _shard(state) if arguments.context_parallel else None
    specs = arguments.model_specs()
    length = arguments.train_length or train_length(arguments.model)
    settings: dict[str, Any] = {"dtype": arguments.dtype, "device": run.device, "seed": arguments.seed}
    if arguments.branches:  # a model without hybrids is refused before the text is read
        hybrid = ModelLoader([], **settings).load(specs[0])
        require_causal(hybrid)
        sizes = window_sizes(hybrid)
        curves: dict[str, Use] = {name: partial(use_each, hybrid, name) for name in arguments.branches}
    documents, texts = load_texts(arguments, load_tokenizer(arguments.tokenizer or arguments.model))
    plan = texts if arguments.stream else plan_windows(texts, **arguments.windows)
    if shard is not None:
        for tokens in arguments.lengths or ():
            check_length(tokens, shard.size)
    exchanged = run.earlier.get("run", {}).get("bytes_exchanged", {})
    where: dict[str, Any] = {"processes": state.num_processes}
    if shard is not None:
        where["bytes_exchanged"] = exchanged
    if arguments.branches:
        of_branches = {"train_length": length, "windows": sizes, "sentences": []}
        run.begin(of_branches, {} if shard is None else where)
    else:
        _check_tokenizers(arguments, specs, documents, texts)
        compared = specs[: len(arguments.compare or [])]
        models = ModelLoader(compared, stream=arguments.stream, **settings)
        curves = {spec.label: partial(_use_causal, models, spec) for spec in specs}
        facts = {"data": _describe_data(texts, plan), "train_length": length}
        run.begin({**facts, "models": [asdict(spec) for spec in specs]}, where)
    for index, (label, use) in enumerate(curves.items(), 1):
        if state.is_main_process and len(curves) > 1:
            print(f"{label} ({index} of {len(curves)})", file=sys.stderr)
        with error_prefix(label) if arguments.compare else nullcontext():
            _measure(arguments, label, use, plan, run, shard, exchanged)
    if arguments.branches:
        run.results["sentences"] = sentences(run.rows, sizes)
    if state.is_main_process:
        _draw(arguments.output_dir / picture, arguments, run.results)
    run.finish("results.csv", COLUMNS)
    return run.results


def _draw(path: Path, arguments: PerplexityArguments, results: dict[str, Any]) -> None:
    specs = [ModelSpec(**spec) for spec in results.get("models", ())]
    grey = {"none"} if arguments.branches else {spec.label for spec in specs if is_reference(spec)}
    with replacing(path) as partial_file:
        rows, length = results["rows"], results["train_length"]
        save_plot(partial_file, rows, length, stream=arguments.stream, reference=grey)


def _shard(state: Any) -> Shard:
    """Make all processes share each window.

    Raises:
        OptionError: there is one.
    """
    if state.num_processes == 1:
        raise OptionError(
            "--context-parallel splits windows over processes, and there is one: start several, as in "
            "accelerate launch --num_processes 2 (with --cpu where there is no GPU)"
        )
    return Shard.of()


@contextmanager
def _use_causal(models: ModelLoader, spec: ModelSpec) -> Iterator[nn.Module]:
    with models.use(spec) as model:
        require_causal(model)
        yield model


def _measure(
    arguments: PerplexityArguments,
    label: str,
    use: Use,
    plan: Texts | Plan,
    run: ResumableRun,
    shard: Shard | None,
    exchanged: dict[str, int],
) -> None:
    """Add the missing rows of one curve; its model is only made if there are some."""
    done = {row["length"] for row in run.rows if row["model"] == label}
    if isinstance(plan, Texts):
        if done:
            return
        assert arguments.segment is not None
        with run.timed(f"{label} stream"), use() as model:
            refuse_growing_cache(model)
            rows = score_stream(
                model, plan, max_tokens=arguments.budget, segment=arguments.segment, progress=True
            )
        # a stream gives all its rows at once: one that is half written would pass for a whole one
        run.rows += [{"model": label, **asdict(row)} for row in rows]
        run.save()
        return
    lengths = [length for length in plan.lengths if length not in done]
    if not lengths:
        return
    assert arguments.batch_size is not None
    settings: dict[str, Any] = {"batch_size": arguments.batch_size, "progress": True, "shard": shard}
    with use() as model, nullcontext() if shard is None else split_rows(model, shard):
        for length in lengths:
            before = 0 if shard is None else shard.sent
            with run.timed(f"{label} {length}"):
                row = score_length(model, plan, length, **settings)
            if shard is not None:
                exchanged[f"{label} {length}"] = shard.total(shard.sent - before)
            run.rows.append({"model": label, **asdict(row)})
            run.save()


def _check_tokenizers(
    arguments: PerplexityArguments, specs: list[ModelSpec], documents: list[str], texts: Texts
) -> None:
    """Refuse a baseline with other tokens: its numbers would answer another question."""
    for spec in specs[1:]:
        if spec.source == arguments.model or arguments.tokenizer is not None:
            continue
        tokenizer = load_tokenizer(spec.source)
        other = encode(tokenizer, documents, bos=arguments.bos, join=arguments.join)
        pairs = zip(other.documents, texts.documents, strict=True)
        if not all(torch.equal(theirs.ids, ours.ids) for theirs, ours in pairs):
            raise DataError(
                f"baseline {spec.source} cuts the text into other tokens than {arguments.model}: measure it "
                "in a run of its own and compare byte_perplexity, or name one tokenizer for both with "
                "--tokenizer"
            )


def _describe_data(texts: Texts, plan: Texts | Plan) -> dict[str, int]:
    sizes = [len(document) for document in texts.documents]
    size = sum(int(document.byte_ends[-1]) for document in texts.documents)
    facts = {"documents": len(sizes), "tokens": sum(sizes), "bytes": size}
    if isinstance(plan, Plan):
        facts["documents_long_enough"] = sum(tokens >= plan.lengths[-1] for tokens in sizes)
    return facts
