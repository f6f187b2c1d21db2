"""The measurement behind the harness command: tasks and models in, rows and files out."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from datasets.exceptions import DatasetsError
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from transformers import set_seed
from yaml import YAMLError

from hf_linattn.errors import DataError, LinattnError, OptionError
from hf_linattn.patching.interface import NAME

from ..common.formatting import text_table
from ..common.models import UNPATCHED, ModelSpec, load_config, name_of
from ..common.results import ResumableRun, recorded
from .model import LinattnLM

FORMAT = "hf_linattn.harness/1"
COLUMNS = (
    *("model", "task", "metric", "filter", "value", "stderr"),
    *("higher_is_better", "num_fewshot", "samples", "version", "requested"),
)
FROM_TASKS = (
    *(AssertionError, ImportError, LookupError, OSError, TypeError, ValueError, YAMLError),
    *(DatasetsError, StopIteration),  # the latter from empty files
)
"""What lm_eval, the code of a task and `datasets` raise for tasks, data and settings that cannot be used."""


def run(args: argparse.Namespace, command: str) -> str | None:
    """Run all tasks on all models; the table comes back, or None in other processes than the first."""
    arguments = recorded(args)
    arguments["include_path"] = None if args.include_path is None else str(args.include_path)
    session = ResumableRun(args.output_dir, arguments, FORMAT, command)
    shown = f"results.json and results.csv in {args.output_dir}"
    if session.complete:
        return f"{table(session.rows)}\n{shown}"
    specs = _model_specs(args)
    for spec in specs:
        load_config(spec.source)
    manager = _task_manager(args)
    lengths = session.earlier.get("run", {}).get("max_length", {})
    session.begin({"models": [asdict(spec) for spec in specs]}, {"max_length": lengths})
    session.results["versions"]["lm_eval"] = metadata.version("lm_eval")
    first = True
    for index, spec in enumerate(specs, 1):
        done = {row["requested"] for row in session.rows if row["model"] == spec.label}
        missing = [task for task in args.tasks if task not in done]
        if not missing:
            continue
        print(f"{spec.label} ({index} of {len(specs)})", file=sys.stderr)
        lm = _load_lm(args, spec)
        session.results["run"] |= {"device": str(lm.device), "processes": lm.world_size}
        lengths[spec.label] = lm.max_length
        for task in missing:
            with session.timed(f"{spec.label} {task}"):
                returned = _evaluate(lm, task, manager, args)
            first = returned is not None
            if returned is None:  # the first process has it
                continue
            session.rows += _task_rows(returned, spec.label, task)
            session.save()
    if not first:
        return None
    session.finish("results.csv", COLUMNS)
    return f"{table(session.rows)}\n{shown}"


def _model_specs(args: argparse.Namespace) -> list[ModelSpec]:
    """Name the model, and its original with --compare-original."""
    name = name_of(args.model)
    label = " ".join(filter(None, [name, args.patch]))
    spec = ModelSpec(label, args.model, args.patch, args.options or {})
    if args.compare_original is None:
        return [spec]
    if args.compare_original == UNPATCHED:
        patched = args.patch if args.patch is not None else getattr(load_config(args.model), NAME, None)
        if patched in (None, UNPATCHED):
            raise OptionError(
                f"--compare-original: {args.model} has no patch to take off, and --patch puts none on; name "
                "another model to compare with"
            )
        return [spec, ModelSpec(f"{name} unpatched", args.model, UNPATCHED)]
    if args.compare_original == spec.label:
        raise OptionError("--compare-original is the measured model itself")
    other = name_of(args.compare_original)
    return [spec, ModelSpec(args.compare_original if other == label else other, args.compare_original)]


def _task_manager(args: argparse.Namespace) -> TaskManager:
    """Load lm_eval's list of tasks, and every task that was asked for."""
    if args.include_path is not None and not args.include_path.is_dir():
        raise OptionError(f"--include-path: no such folder: {args.include_path}")
    with _lm_eval_errors("lm_eval's list of tasks"):
        manager = _index(args)
    for task in args.tasks:
        if task not in manager.task_index and not _is_file(task):
            near = get_close_matches(task, manager.all_tasks, n=3)
            hint = f" Did you mean {', '.join(near)}?" if near else ""
            raise OptionError(
                f"lm_eval has no task {task!r}.{hint} `lm_eval ls tasks` lists them; tasks of your own need "
                "--include-path"
            )
    for task in args.tasks:
        with _lm_eval_errors(f"task {task}"), redirect_stdout(sys.stderr):
            manager.load([task])
    return manager


def _index(args: argparse.Namespace) -> TaskManager:
    """List tasks by name, those of lm_eval only if one was asked for: reading them takes a while."""
    include = None if args.include_path is None else str(args.include_path)
    # what lm_eval's own command hands to tasks that cut their prompts to a number of tokens
    metadata_of_tasks = {"pretrained": args.tokenizer or args.model, **(args.metadata or {})}
    own = TaskManager(include_path=include, include_defaults=False, metadata=metadata_of_tasks)
    # a group of one's own may have parts that come with lm_eval
    if all(task in own.all_subtasks or _is_file(task) for task in args.tasks):
        return own
    return TaskManager(include_path=include, metadata=metadata_of_tasks)


def _is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml")) and Path(task).is_file()


def _load_lm(args: argparse.Namespace, spec: ModelSpec) -> LinattnLM:
    set_seed(args.seed)
    names = ("tokenizer", "dtype", "device", "batch_size", "max_length")
    settings = {name: getattr(args, name) for name in names}
    lm = LinattnLM(spec.source, patch=spec.patch, options=spec.options, **settings)
    if int(os.environ.get("WORLD_SIZE", "1")) > lm.world_size:
        raise OptionError(
            "lm_eval shares requests among processes only where each has a GPU of its own; here each would "
            "do everything: start one"
        )
    return lm


def _evaluate(lm: LinattnLM, task: str, manager: TaskManager, args: argparse.Namespace) -> Any:
    """Run one task or group of lm_eval; None in other processes than the first."""
    names = ("num_fewshot", "batch_size", "limit", "bootstrap_iters", "apply_chat_template", "gen_kwargs")
    settings = {name: getattr(args, name) for name in names}
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    settings |= dict.fromkeys(seeds, args.seed)
    with _lm_eval_errors(f"task {task}"), redirect_stdout(sys.stderr):
        return simple_evaluate(lm, tasks=[task], task_manager=manager, log_samples=False, **settings)


@contextmanager
def _lm_eval_errors(where: str) -> Iterator[None]:
    """Turn what lm_eval, a task or its data raise into one error that says where."""
    try:
        yield
    except LinattnError:
        raise
    except torch.OutOfMemoryError as error:
        raise LinattnError(
            f"{where}: out of memory: take a smaller --batch-size or --max-length, or --dtype bfloat16"
        ) from error
    except FROM_TASKS as error:
        unsaid = "its data are empty" if isinstance(error, StopIteration) else "no reason given"
        line = (str(error).strip() or unsaid).splitlines()[0]
        raise DataError(f"{where}: lm_eval stopped with {type(error).__name__}: {line}") from error


def _task_rows(returned: Mapping[str, Any], label: str, requested: str) -> list[dict[str, Any]]:
    """Make a row per task, metric and filter of lm_eval's results; of a group, the group's and all parts'."""
    rows = []
    for task, metrics in (returned["results"] | returned.get("groups", {})).items():
        for key, value in metrics.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = _number(metrics.get(f"{metric}_stderr,{chosen}"))
            rows.append(
                {
                    "model": label,
                    "requested": requested,
                    "task": task,
                    "metric": metric,
                    "filter": chosen,
                    "value": _number(value),
                    # lm_eval writes N/A where there is none
                    "stderr": error if isinstance(error, float) else None,
                    "higher_is_better": returned["higher_is_better"].get(task, {}).get(metric),
                    "num_fewshot": returned["n-shot"].get(task),
                    "samples": returned["n-samples"].get(task, {}).get("effective"),
                    "version": returned["versions"].get(task),
                }
            )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Align the values: a line per task, metric and filter, a column per model."""
    labels = list(dict.fromkeys(row["model"] for row in rows))
    lines = []
    groups: dict[tuple[str, str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["metric"], row["filter"]), {})[row["model"]] = row
    for (task, metric, chosen), cells in groups.items():
        row = next(iter(cells.values()))
        better = {True: "higher is better", False: "lower is better"}.get(row["higher_is_better"], "")
        name = metric if chosen == "none" else f"{metric} ({chosen})"
        shots = "" if row["num_fewshot"] is None else str(row["num_fewshot"])
        lines.append([task, shots, name, better, *(_cell(cells.get(label)) for label in labels)])
    titles = ["task", "n-shot", "metric", "", *labels]
    return text_table(titles, lines, left=len(titles))


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    value = row["value"] if isinstance(row["value"], str) else f"{row['value']:.4f}"
    return value if row["stderr"] is None else f"{value} +- {row['stderr']:.4f}"


def _number(value: Any) -> float | str:
    """Return a finite number, or its text: JSON knows no infinity."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else str(number)
