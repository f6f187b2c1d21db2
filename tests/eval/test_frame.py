"""What all evaluation commands have in common: options of one meaning, examples that run."""

from __future__ import annotations

import argparse
import doctest
from importlib import import_module

import pytest

from hf_linattn.errors import OptionError
from hf_linattn.eval.common import cli, formatting
from hf_linattn.eval.perplexity import measure

OURS = ("perplexity", "recall", "generation", "diagnose", "layers", "harness")


@pytest.mark.parametrize("module", [measure, formatting], ids=lambda module: module.__name__)
def test_examples_run(module):
    failed, tried = doctest.testmod(module)
    assert tried > 0
    assert failed == 0


def options_of(name):
    parser = import_module(f"hf_linattn.eval.{name}.__main__").build_parser()
    return {option: action for action in parser._actions for option in action.option_strings}


def test_an_option_has_one_type_in_every_command():
    shared = ("--dtype", "--seed", "--column", "--split", "--join", "--bos", "--data", "--tokenizer")
    shared += ("--output-dir", "--options", "--max-tokens", "--train-length", "--compare", "--batch-size")
    types = {}
    for name in OURS:
        for option, action in options_of(name).items():
            if option in shared and (name, option) != ("harness", "--batch-size"):  # may be "auto" there
                kind = getattr(action.type, "__qualname__", action.type)
                types.setdefault(option, set()).add((type(action).__name__, action.nargs, kind))
    assert {option: kinds for option, kinds in types.items() if len(kinds) > 1} == {}
    assert set(shared) == set(types)


@pytest.mark.parametrize("name", OURS)
def test_other_spellings_mean_the_same(name):
    options = options_of(name)
    for one, other in (("--column", "--text-column"), ("--split", "--data-split")):
        assert options.get(one) is options.get(other)


def run(work, **settings):
    parser = cli.command_parser("perplexity", "", "")
    parser.add_argument("--size", type=cli.positive_int, default=1)
    return cli.run_command(parser, work, ["--size", "2"], **settings)


def test_a_command_says_how_it_was_started_and_prints_what_its_work_returns(capsys, monkeypatch):
    assert run(lambda args, command: f"{command}: {args.size}") == 0
    assert capsys.readouterr().out == "python -m hf_linattn.eval.perplexity --size 2: 2\n"
    monkeypatch.setenv("RANK", "1")
    assert run(lambda args, command: "said once") == 0
    assert capsys.readouterr().out == ""


def test_a_combination_that_cannot_be_is_wrong_usage(capsys):
    def check(args: argparse.Namespace) -> None:
        raise OptionError("no such combination")

    with pytest.raises(SystemExit, match="2"):
        run(lambda args, command: pytest.fail("work was begun"), check=check)
    assert "error: no such combination" in capsys.readouterr().err


def test_a_table_of_text():
    text = formatting.text_table(["a", "value"], [["long name", "1"], ["b", "22"]])
    assert text == "a          value\nlong name      1\nb             22"
    assert formatting.text_table(["a"], []) == "a"


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (cli.natural_int, "-1", "expected a whole number of at least 0, got '-1'"),
        (cli.natural_int, "x", "expected a whole number of at least 0, got 'x'"),
        (cli._folder, "", "the name of the folder is empty"),
    ],
)
def test_wrong_values_say_what_is_right(parse, text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        parse(text)
