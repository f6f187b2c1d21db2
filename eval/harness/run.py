"""The measurement behind the harness command: tasks and models in, rows and files out."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
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

from hf_linattn.cli.main import quiet_libraries
from hf_linattn.errors import DataError, LinattnError, OptionError
from hf_linattn.patching.interface import NAME

from ..common import results as files
from ..common.models import UNPATCHED, Curve, load_config
from .model import LinattnLM
from .rows import COLUMNS, FORMAT, task_rows

FROM_TASKS = (
    *(AssertionError, ImportError, LookupError, OSError, TypeError, ValueError, YAMLError),
    *(DatasetsError, StopIteration),  # the latter from empty files
)
"""What lm_eval, the code of a task and `datasets` raise for tasks, data and settings that cannot be used."""


def run(args: argparse.Namespace, command: str) -> dict[str, Any] | None:
    """Run all tasks on all models; the content of results.json, or None in other processes than the first."""
    recorded = _recorded(args)
    earlier = files.load(args.output_dir, recorded, FORMAT)
    if earlier is not None and earlier["complete"]:
        return earlier
    files.check_writable(args.output_dir)
    measured = models(args)
    for curve in measured:
        load_config(curve.source)
    manager = task_manager(args)
    rows: list[dict[str, Any]] = earlier["rows"] if earlier else []
    quiet_libraries(int(os.environ.get("RANK", "0")))
    results: dict[str, Any] = {
        "format": FORMAT,
        "complete": False,
        "command": command,
        "arguments": recorded,
        "seed": args.seed,
        "versions": files.versions() | {"lm_eval": metadata.version("lm_eval")},
        "models": [asdict(curve) for curve in measured],
        "rows": rows,
        "run": earlier["run"] if earlier else {"seconds": {}, "max_length": {}},
    }
    first = True
    for index, curve in enumerate(measured, 1):
        done = {row["requested"] for row in rows if row["model"] == curve.label}
        missing = [task for task in args.tasks if task not in done]
        if not missing:
            continue
        print(f"{curve.label} ({index} of {len(measured)})", file=sys.stderr)
        lm = load_lm(args, curve)
        results["run"] |= {"device": str(lm.device), "processes": lm.world_size}
        results["run"]["max_length"][curve.label] = lm.max_length
        for task in missing:
            start = time.perf_counter()
            found = evaluate(lm, task, manager, args)
            first = found is not None
            if found is None:  # the first process has it
                continue
            rows += task_rows(found, curve.label, task)
            results["run"]["seconds"][f"{curve.label} {task}"] = round(time.perf_counter() - start, 3)
            files.save(args.output_dir, results)
    results["complete"] = True
    if not first:
        return None
    files.save_csv(args.output_dir / "results.csv", rows, COLUMNS)
    files.save(args.output_dir, results)  # last: it says that the table is there
    return results


def models(args: argparse.Namespace) -> list[Curve]:
    """The model, and its original with --compare-original.

    Raises:
        OptionError: they are the same.
    """
    name = Path(args.model).name or args.model
    found = [Curve(" ".join(filter(None, [name, args.patch])), args.model, args.patch, args.options or {})]
    if args.compare_original == UNPATCHED:
        patched = args.patch if args.patch is not None else getattr(load_config(args.model), NAME, None)
        if patched in (None, UNPATCHED):
            raise OptionError(
                f"--compare-original: {args.model} has no patch to take off, and --patch puts none on; name "
                "another model to compare with"
            )
        found.append(Curve(f"{name} unpatched", args.model, UNPATCHED))
    elif args.compare_original is not None:
        label = Path(args.compare_original).name or args.compare_original
        taken = label == found[0].label
        found.append(Curve(args.compare_original if taken else label, args.compare_original))
        if found[1].label == found[0].label:
            raise OptionError("--compare-original is the measured model itself")
    return found


def task_manager(args: argparse.Namespace) -> TaskManager:
    """lm_eval's list of tasks, once all those wanted can be had.

    Raises:
        OptionError: a task is unknown, or the folder of --include-path is not there.
        DataError: a task or its data cannot be loaded.
    """
    if args.include_path is not None and not args.include_path.is_dir():
        raise OptionError(f"--include-path: no such folder: {args.include_path}")
    with lm_eval_errors("lm_eval's list of tasks"):
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
        with lm_eval_errors(f"task {task}"), redirect_stdout(sys.stderr):
            manager.load([task])
    return manager


def _index(args: argparse.Namespace) -> TaskManager:
    """Tasks by name, those that come with lm_eval only if one is wanted: reading them takes a while."""
    include = None if args.include_path is None else str(args.include_path)
    # what lm_eval's own command hands to tasks that cut their prompts to a number of tokens
    told = {"pretrained": args.tokenizer or args.model, **(args.metadata or {})}
    own = TaskManager(include_path=include, include_defaults=False, metadata=told)
    # a group of one's own may have parts that come with lm_eval
    if all(task in own.all_subtasks or _is_file(task) for task in args.tasks):
        return own
    return TaskManager(include_path=include, metadata=told)


def _is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml")) and Path(task).is_file()


def load_lm(args: argparse.Namespace, curve: Curve) -> LinattnLM:
    """The model as lm_eval takes it.

    Raises:
        OptionError: several processes that lm_eval would not share the requests among.
        LinattnError: see `LinattnLM`.
    """
    set_seed(args.seed)
    lm = LinattnLM(
        curve.source,
        patch=curve.patch,
        options=curve.options,
        tokenizer=args.tokenizer,
        dtype=args.dtype,
        device=args.device,
        batch_size=args.batch_size,
        max_length=args.max_length,
    )
    if int(os.environ.get("WORLD_SIZE", "1")) > lm.world_size:
        raise OptionError(
            "lm_eval shares requests among processes only where each has a GPU of its own; here each would "
            "do everything: start one"
        )
    return lm


def evaluate(lm: LinattnLM, task: str, manager: TaskManager, args: argparse.Namespace) -> Any:
    """What lm_eval returns for one task or group, None in other processes than the first."""
    with lm_eval_errors(f"task {task}"), redirect_stdout(sys.stderr):
        return simple_evaluate(
            model=lm,
            tasks=[task],
            task_manager=manager,
            num_fewshot=args.num_fewshot,
            batch_size=args.batch_size,
            limit=args.limit,
            bootstrap_iters=args.bootstrap_iters,
            apply_chat_template=args.apply_chat_template,
            gen_kwargs=args.gen_kwargs,
            log_samples=False,
            random_seed=args.seed,
            numpy_random_seed=args.seed,
            torch_random_seed=args.seed,
            fewshot_random_seed=args.seed,
        )


@contextmanager
def lm_eval_errors(where: str) -> Iterator[None]:
    """Turn what lm_eval, a task or its data raise into one error that says where.

    Raises:
        DataError: with the first line of what came.
        LinattnError: out of memory.
    """
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


def _recorded(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments as results.json keeps them."""
    plain = {key: value for key, value in vars(args).items() if key != "output_dir"}
    plain["include_path"] = None if args.include_path is None else str(args.include_path)
    return plain
