"""A small workplace for the tests of training commands: a model, texts, fixtures, readers and kills."""

import csv
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_linattn import registry
from hf_linattn.attention import Modifier
from hf_linattn.finetune.__main__ import main

STEPS = 10
BASE = (
    "--model",
    "model",
    "--data",
    "train.txt",
    "--block-size",
    "32",
    "--batch-size",
    "4",
    "--lr",
    "1e-2",
    "--cpu",
)
SHORT = (
    *BASE,
    "--max-steps",
    str(STEPS),
    "--eval-data",
    "eval.txt",
    "--eval-every",
    "4",
    "--eval-blocks",
    "6",
)


class Gain(Modifier):
    """A patch with a learned parameter: one gain of the query for all heads."""

    name = "gain"

    def __init__(self, site):
        super().__init__(site)
        self.gain = nn.Parameter(torch.ones(()))

    def query_scale(self, visible):
        return self.gain.to(visible.dtype) * torch.ones_like(visible)


def make_workplace(folder):
    """A Llama of 11k parameters with dropout, a byte tokenizer and texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bytes_only, bos_token="<s>").save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, attention_dropout=0.1, tie_word_embeddings=True, bos_token_id=256,
        eos_token_id=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "train.txt").write_text("the cat sat on the mat and the dog ran to the log. " * 60)
    (folder / "eval.txt").write_text("the dog sat on the log and the cat ran to the mat. " * 8)
    (folder / "tiny.txt").write_text("too short")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune")
    make_workplace(folder)
    return folder


@pytest.fixture
def surroundings(workplace, monkeypatch):
    """In the data's folder; one thread as in the subprocesses; accelerate's process-wide state cleared."""
    monkeypatch.chdir(workplace)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def gain(monkeypatch):
    registry.patches()
    monkeypatch.setitem(registry._PATCHES, "gain", Gain)


@pytest.fixture(scope="module")
def finished(workplace):
    """Folder of an uninterrupted run."""
    here = Path.cwd()
    os.chdir(workplace)
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert main([*SHORT, "--output-dir", "finished"]) == 0
    os.chdir(here)
    return workplace / "finished"


def rows_of(folder):
    with (Path(folder) / "train.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def weights_of(folder):
    return (Path(folder) / "model.safetensors").read_bytes()


def stable_rows(folder):
    """All columns but the one that is a clock's."""
    return [
        {name: value for name, value in row.items() if name != "tokens_per_second"} for row in rows_of(folder)
    ]


def start_slowly(command, *argv):
    """`python -m hf_linattn.<command>` with slow steps, so that a kill meets the one it is meant for."""
    script = (
        "import sys, time\n"
        f"from hf_linattn.{command}.__main__ import main\n"
        "from hf_linattn.training import loop\n"
        "step = loop.TrainingLoop._train_step\n"
        "loop.TrainingLoop._train_step = lambda self: (time.sleep(0.1), step(self))[1]\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen([sys.executable, "-c", script, *argv], env=environment, stderr=subprocess.DEVNULL)


def kill_at_step(process, folder, step):
    """SIGKILL once train.csv has the row of this step."""
    deadline = time.monotonic() + 120
    while not (
        Path(folder, "train.csv").exists() and any(row["step"] == str(step) for row in rows_of(folder))
    ):
        assert process.poll() is None, "the command ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=30) == -signal.SIGKILL
    for held in (Path(folder), Path(folder).parent):  # with a warm start the run itself dies a moment later
        while not _free(held):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def _free(folder):
    """Whether no run holds a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def free_port():
    """A port that nobody listens at, as text."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def in_child(action, timeout=60):
    """Wait status of `action` in a forked child without exit handlers. SIGALRM ends a child that hangs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads; ours sleep
        pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(timeout)
            os._exit(action())
        finally:
            os._exit(99)
    return os.waitpid(pid, 0)[1]


def die_at_event(number, monkeypatch):
    """SIGKILL this process when files are flushed, renamed or appended to for the given time."""
    left = number

    def dying(function):
        def wrapper(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapper

    monkeypatch.setattr(os, "fsync", dying(os.fsync))
    monkeypatch.setattr(Path, "replace", dying(Path.replace))
    monkeypatch.setattr(csv.DictWriter, "writerow", dying(csv.DictWriter.writerow))
