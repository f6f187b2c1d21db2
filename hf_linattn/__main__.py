"""Run another package's command with this package imported, so that it loads patched folders.

python -m hf_linattn serve FOLDER                    transformers' server; `chat` likewise
python -m hf_linattn lm_eval --model hf ...          any command that pip installed, by its name
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from safetensors import SafetensorError

import hf_linattn  # noqa: F401
from hf_linattn.cli.main import exit_status
from hf_linattn.errors import CheckpointError, OptionError
from hf_linattn.patching.loading import first_line

TRANSFORMERS = ("chat", "serve")
"""Commands of `transformers` that need not be named by it."""
OWN = {
    "convert": "change a model's attention, in stages that keep what it knows",
    "finetune": "fine-tune a model, patched or not, on text",
    "eval.perplexity": "perplexity against length: does more context help or hurt?",
    "eval.recall": "can a model find again what it read?",
    "eval.generation": "does it still write the same?",
    "eval.layers": "which layers should stay softmax?",
    "eval.diagnose": "what its attention does on a text, per layer and head",
    "eval.harness": "tasks of lm_eval",
    "eval.report": "one page about any number of result folders",
    "bench": "time and memory beside softmax: from how many tokens on is it worth it?",
    "demo": "the whole story in minutes: patch, fine-tune, measure, see a page",
}
"""Commands of this package, each a module with its own `--help`."""
SERVER = ("fastapi", "openai", "pydantic", "uvicorn")
NO_ANSWER = ("ConnectError", "ConnectTimeout")
"""What a client raises where nobody listens: httpx's, which huggingface_hub has under more than one name."""


def usage() -> str:
    """List the commands."""
    own = "\n".join(f"  python -m hf_linattn.{name:16} {what}" for name, what in OWN.items())
    return f"""\
usage: python -m hf_linattn COMMAND [its options]

Run another package's command with this package imported, so that it loads patched folders:
  serve FOLDER, chat FOLDER             transformers' server and chat
  lm_eval, trl, ...                     any command that pip installed, by its name

This package's own commands are modules; --help of each says more:
{own}"""


def run(argv: list[str]) -> None:
    """Find a command and run it.

    Raises:
        OptionError: there is none of this name, or no server to chat with. ModuleNotFoundError: what it needs
            is not installed. CheckpointError: a folder that it reads is missing or damaged.
    """
    if argv and argv[0] in ("-h", "--help"):
        sys.stdout.write(f"{usage()}\n")
        return
    if argv and argv[0] in TRANSFORMERS:
        argv = ["transformers", *argv]
    known = {entry.name: entry for entry in entry_points(group="console_scripts")}
    if not argv or argv[0] not in known:
        what = f"unknown command {argv[0]!r}" if argv else "no command"
        if argv and argv[0] in OWN:
            what = f"{argv[0]!r} is a module: python -m hf_linattn.{argv[0]}"
        raise OptionError(
            f"{what}; python -m hf_linattn takes serve, chat, or a command that pip installed, such as "
            "lm_eval or trl. --help lists all"
        )
    if argv[:2] == ["transformers", "serve"] and "--help" not in argv:
        for package in SERVER:
            __import__(package)
    command = known[argv[0]].load()
    sys.argv = argv
    # of a folder that is missing or damaged; transformers' server finds out with ValueErrors too
    damage = (OSError, SafetensorError, *([ValueError] if argv[0] == "transformers" else []))
    try:
        status = command()
    except damage as error:
        raise CheckpointError(first_line(error)) from error
    except Exception as error:
        if type(error).__name__ not in NO_ANSWER:
            raise
        raise OptionError(f"no server answers ({first_line(error)}): start `serve FOLDER` first") from error
    sys.exit(status)


if __name__ == "__main__":
    sys.exit(exit_status(lambda: run(sys.argv[1:]), interrupted="the command was stopped", extra="serve"))
