"""Commands on the pages are taken by the commands of today: their options, and those of their patches."""

import importlib
import os
import re
import shlex
import subprocess

import pytest
from helpers.paths import ROOT

from hf_linattn.eval.bench.candidates import check
from hf_linattn.registry import parse

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
BLOCK = re.compile(r"^```(?:text|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINE = re.compile(r"python -m hf_linattn\.|export |[A-Za-z_]+=")
PARSERS = {
    "bench": "eval.bench.__main__",
    "convert": "convert.arguments",
    "finetune": "finetune.arguments",
    **{
        f"eval.{name}": f"eval.{name}.__main__"
        for name in ("diagnose", "generation", "harness", "layers", "perplexity", "recall", "report")
    },
    "demo": "demo.__main__",
    "demo.laptop": "demo.laptop",
}
SHOW = """
python() { if [ "$1" = -m ]; then printf '%s\\0' "$@"; printf '\\n'; else echo a-file; fi; }
"""


def commands(page):
    """Have bash expand variables and quotes: lists of arguments."""
    blocks = "".join(BLOCK.findall(page.read_text(encoding="utf-8"))).replace("\\\n", " ")
    lines = (re.split(" > | && ", line)[0] for line in blocks.splitlines() if LINE.match(line))
    script = SHOW + "\n".join(lines)
    others = {name: name for name in re.findall(r"\$(\w+)", script)}
    ran = subprocess.run(
        ["bash", "-c", script], env=os.environ | others, capture_output=True, text=True, check=True
    )
    return [line.split("\0")[:-1] for line in ran.stdout.splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_their_options_are_there(page):
    for _, module, *words in commands(page):
        name = module.removeprefix("hf_linattn.")
        if name not in PARSERS or "--help" in words:
            continue
        given = parser_of(name).parse_args(words)
        options, patch = getattr(given, "options", None) or {}, getattr(given, "patch", None)
        if name == "bench" and not given.docs:
            check(given.patches or [], options, not given.bidirectional)
        elif isinstance(patch, str) and patch not in ("none", "unpatched"):
            parse(patch, options)


def test_there_are_many():
    assert sum(len(commands(page)) for page in PAGES) > 100


def parser_of(name):
    return importlib.import_module(f"hf_linattn.{PARSERS[name]}").build_parser()


@pytest.mark.parametrize("name", PARSERS)
def test_examples_of_help_are_taken(name):
    examples = re.search(r"^examples.*:\n((?:  .*\n|\n)+)", parser_of(name).epilog, re.MULTILINE)[1]
    lines = [shlex.split(line, comments=True) for line in examples.replace("\\\n", " ").splitlines()]
    taken = 0
    for words in filter(None, lines):
        command, *given = words[words.index("-m") + 1 :] if "-m" in words else words
        if command == name.rpartition(".")[2] or command == f"hf_linattn.{name}":
            rest = ["--model", "M", "--data", "D", "--output-dir", "O"] if given[0] == "..." else []
            parser_of(name).parse_args([*rest, *(word for word in given if word != "...")])
            taken += 1
    assert taken


@pytest.mark.parametrize("name", PARSERS)
def test_help_says_every_default(name):
    for action in parser_of(name)._actions:
        if action.default not in (None, False, "==SUPPRESS==", [], {}):
            assert "default" in action.help, action.option_strings
