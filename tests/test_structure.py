"""The folders of the package: imports run toward the core and never in a circle, files are not too long."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

LEVELS = (
    {"errors"},
    {"ops", "cli", "data", "parallel"},
    {"attention"},
    {"registry"},
    {"patching"},
    {"training"},
    {"finetune"},
    {"convert"},
    {"patches", "demo", "eval", "bench", "__main__"},
)
"""Folders and files of hf_linattn, from the core outward; each imports those of its line and before it."""
RANK = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
PLACES = {"hf_linattn": "hf_linattn", "patches": "hf_linattn.patches", "eval": "hf_linattn.eval"}
MOST_LINES = 500


def modules():
    """Dotted name -> file, for all that is installed."""
    named = {}
    for folder, package in PLACES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            named[".".join((package, *parts))] = path
    return named


def imports(name, path, known):
    """The modules of the package that a file imports, wherever in the file."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join(filter(None, [*base, node.module]))
            for alias in node.names:
                yield from (target for target in (f"{origin}.{alias.name}", origin) if target in known)


@pytest.fixture(scope="module")
def arrows():
    """Module -> modules that it imports. A package's `__init__` may name its own files."""
    known = modules()
    graph = {name: set(imports(name, path, known)) - {name} for name, path in known.items()}
    for name, targets in graph.items():
        graph[name] = {t for t in targets if not name.startswith(t + ".")}
    return graph


def room(name):
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_every_room_has_its_level():
    assert {room(name) for name in modules()} - {""} == set(RANK)


def test_arrows_run_toward_the_core(arrows):
    up = [
        f"{name} imports {target}"
        for name, targets in arrows.items()
        for target in targets
        if room(name) and room(target) and RANK[room(name)] < RANK[room(target)]
    ]
    assert not up


def test_attentions_do_not_know_the_evaluation_and_the_evaluation_does_not_know_the_demo(arrows):
    for name, targets in arrows.items():
        forbidden = {"patches": {"eval", "demo", "training", "finetune", "convert"}, "eval": {"demo"}}
        wrong = [target for target in targets if room(target) in forbidden.get(room(name), ())]
        assert not wrong, f"{name} imports {wrong}"


def test_no_circle(arrows):
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            path.append(name)
            for target in sorted(arrows[name]):
                visit(target)
            path.pop()
            done.add(name)

    for name in arrows:
        visit(name)


def test_a_broken_arrow_would_be_seen(tmp_path):
    file = tmp_path / "cache.py"
    file.write_text("def late():\n    from hf_linattn.patching import patch\n")
    known = {"hf_linattn.patching.patch", "hf_linattn.patching"}
    assert set(imports("hf_linattn.attention.cache", file, known)) == known


@pytest.mark.parametrize("folder", ["hf_linattn", "patches", "eval", "tests", "tools", "examples"])
def test_no_file_is_longer_than_one_idea(folder):
    long = {
        str(path.relative_to(ROOT)): lines
        for path in (ROOT / folder).rglob("*.py")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MOST_LINES
    }
    assert not long


def test_imports_load_neither_datasets_nor_the_training_loop():
    commands = [
        name for name in modules() if name.startswith("hf_linattn.eval.") and name.endswith("__main__")
    ]
    assert len(commands) >= 8
    # transformers' own model classes import accelerate where it is installed
    first = (
        "import sys, torch; from transformers import PreTrainedModel, AutoTokenizer; "
        "from transformers.cache_utils import Cache; before = set(sys.modules)"
    )
    steps = (
        "import hf_linattn",
        "import hf_linattn.eval.perplexity.measure",
        "; ".join(f"import {name}" for name in commands),
    )
    code = "\n".join([first, *(f"{step}; print(*sorted(set(sys.modules) - before))" for step in steps)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    package, measure, every = map(set, map(str.split, done.stdout.splitlines()))
    assert not package & {"accelerate", "datasets", "evaluate", "peft", "matplotlib", "jinja2", "tqdm"}
    assert not [name for name in measure if name == "datasets" or name.startswith("hf_linattn.training")]
    assert not every & {"accelerate", "datasets", "evaluate", "peft", "matplotlib", "lm_eval"}
    assert not [name for name in every if name.startswith("hf_linattn.training")]


def test_packages_are_named_in_pyproject():
    text = (Path(ROOT) / "pyproject.toml").read_text(encoding="utf-8")
    missing = [
        name for name, path in modules().items() if path.name == "__init__.py" and f'"{name}"' not in text
    ]
    assert not missing
