"""Rows and heads split over processes (gloo, on this machine), against the same model in one."""

import json
import random
import subprocess
import sys

import pytest
import torch
from helpers.fixtures_finetune import free_port, make_workplace, rows_of
from helpers.paths import ROOT
from safetensors.torch import load_file

from hf_linattn.errors import OptionError, ProcessLostError, TrainingError
from hf_linattn.parallel import Shard, lost_processes

CASES = {
    "elu1": ("elu1", {}),
    "learned map": ("hedgehog", {}),
    "decay": ("decay", {"half_life": 8.0}),
    "gated": ("gated", {"half_life": 8.0}),
    "gated by the hidden state": ("gated", {"source": "hidden", "half_life": 8.0}),
    "delta": ("delta", {"half_life": 8.0}),
    "delta by channel": ("delta", {"decay": "channel", "feature_map": "elu1"}),
    "delta behind a convolution": ("delta", {"conv": 4, "decay": "none", "beta": 1.9}),
    "counts of keys": ("logn+cosine", {"logn": {"train_length": 8}}),
    "window": ("window", {"size": 6}),
    "window with sinks": ("window", {"size": 6, "sinks": 3}),
    "window over several processes": ("window", {"size": 29, "sinks": 1}),
    "window+elu1": ("window+elu1", {"size": 6, "sinks": 2, "mix": "learned"}),
    "window+learned map": ("window+hedgehog", {"size": 17}),
    "window+gated": ("window+gated", {"size": 6, "sinks": 2, "half_life": 8.0}),
    "window+delta": ("window+delta", {"size": 6, "sinks": 2, "half_life": 8.0}),
    "hybrid of layers": ({"0": "elu1", "1": "softmax"}, {}),
    "scores with a sink": ({"0": "window+elu1", "1": "softmax1"}, {}),
    "pattern of ranks": ("strided", {}),
}
MILLION = 1_000_000
SOME = ("elu1", "gated", "delta", "window+elu1", "window+delta", "hybrid of layers")
FOUR = (*SOME, "window over several processes", "delta behind a convolution", "window with sinks")
FAMILIES = ("gpt2", "gpt_neox", "opt", "qwen3", "mixtral", "olmo3")
HEADS = {
    "rates by number, hidden state": {
        "0": ("decay+output_norm", {"normalise": "none", "feature_map": "cosine"}),
        "1": ("window+gated", {"size": 6, "sinks": 2, "source": "hidden"}),
    },
    "drawn, chosen": {
        "0": ("delta", {"decay": "channel", "conv": 4}),
        "1": ("h2o", {"size": 6, "heavy": 4}),
    },
    "scores, no weights": {
        "0": ("softmax1+kerple+temperature+output_gate", {"sink": "learned"}),
        "1": "elu1",
    },
    "heads gathered": {"0": ("gated+logn", {"source": "hidden", "kappa": "learned"})},
}
"""What tensor parallelism could get wrong, by layer."""
REFUSED = {
    "unpatched": ({"patch": "softmax"}, "is not patched"),
    "no split state": ({"patch": {"0": "elu1", "1": "flow"}}, "model.layers.1.self_attn: its state has no"),
    "gates of scores": ({"patch": "fox"}, "'fox' needs the gates of all tokens"),
    "salient": ({"patch": "window+elu1", "options": {"salient": 4}}, "Give salient=0"),
    "own window": ({"patch": "elu1", "family": "alternating"}, "sliding='global'"),
    "other mixers": (
        {"patch": "elu1", "family": "lfm2_moe", "sliding": "global"},
        "besides its attention mixes",
    ),
    "own positions": ({"patch": "elu1", "family": "camembert"}, "counts them by itself"),
    "counted queries": ({"patch": "elu1", "family": "llama4_text", "sliding": "global"}, "counted in each"),
    "no positions": ({"patch": "elu1", "family": "blenderbot"}, "position_ids"),
    "length": ({"patch": "elu1", "length": 45}, "take 44 or 46 tokens"),
    "too short": ({"patch": "elu1", "length": 2}, "take 4 tokens"),
}
CALLS = {
    "cache": ({"use_cache": True}, "use_cache=False"),
    "padding": ({"use_cache": False, "attention_mask": [[0] + [1] * 15]}, "has padding"),
}


class Jobs:
    """Jobs of `parallel_jobs.py`, and what came out of them."""

    def __init__(self, folder, python=sys.executable):
        self.python, self.folder, self.jobs, self.numbers = python, folder, [], {}

    def add(self, name, world, call, *arguments, seconds=90):
        self.numbers[name] = len(self.jobs)
        self.jobs.append(
            {"world": world, "call": call, "arguments": arguments, "port": free_port(), "seconds": seconds}
        )

    def run(self):
        (self.folder / "jobs.json").write_text(json.dumps(self.jobs))
        script = str(ROOT / "tests" / "helpers" / "parallel_jobs.py")
        done = subprocess.run(
            [self.python, script, "jobs.json"],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return self

    def exits(self, name):
        return json.loads((self.folder / f"{self.numbers[name]}.exit.json").read_text())

    def results(self, name, rank=0):
        number = self.numbers[name]
        path = self.folder / f"{number}.{rank}.json"
        assert path.exists(), (self.folder / f"{number}.{rank}.err").read_text()
        return json.loads(path.read_text())


MODEL = ("--model", "model", "--patch", "window+gated", "--options", '{"size": 8, "sinks": 2}')
TUNE = (
    *(*MODEL, "--data", "train.txt", "--block-size", "32", "--max-steps", "4", "--lr", "1e-2", "--cpu"),
    *("--no-dropout", "--eval-data", "eval.txt", "--eval-every", "2", "--eval-blocks", "6"),
    *("--checkpoint-every", "2"),
)
MEASURE = (*MODEL, "--data", "train.txt", "--lengths", "16,...,64", "--max-tokens", "128", "--stride", "8")


def finetune(*words):
    return {"name": "finetune", "argv": [*TUNE, *words]}


def perplexity(*words):
    return {"name": "perplexity", "argv": [*MEASURE, *words]}


@pytest.fixture(scope="module")
def jobs(made_once, warm_python):
    """All of them, run once also where tests of this file are spread over several processes."""

    def fill(folder):
        make_workplace(folder)
        jobs_in(folder, warm_python).run()

    return jobs_in(made_once("parallel", fill), warm_python)


def jobs_in(folder, python):
    found = Jobs(folder, python)
    cases = {name: {"patch": patch, "options": options} for name, (patch, options) in CASES.items()}
    families = [{"patch": "window+gated", "options": {"size": 6}, "family": name} for name in FAMILIES]
    families = [{**case, "sliding": "global"} for case in families]
    split = ("--context-parallel", "2")
    found.add("two", 2, "compare", *cases.values())
    found.add("four", 4, "compare", *(cases[name] for name in FOUR))
    found.add("float32", 2, "compare", *({**cases[name], "dtype": "float32"} for name in SOME))
    found.add("bfloat16", 2, "compare", *({**cases[name], "dtype": "bfloat16"} for name in SOME[3:]))
    found.add("again", 2, "compare", *({**cases[name], "recompute": True} for name in SOME[:3]))
    found.add("long", 4, "compare", *({**cases[name], "length": 512} for name in SOME))
    found.add("families", 2, "compare", *families)
    types = {"drawn, chosen": "qwen3", "heads gathered": "olmo2"}
    shared = [
        {"name": name, "patch": patch, "family": types.get(name, "llama")} for name, patch in HEADS.items()
    ]
    found.add("heads", 2, "heads", *shared, seconds=200)
    found.add("refused", 2, "refused", *(case for case, _ in REFUSED.values()))
    found.add("calls", 2, "call_refused", *(case for case, _ in CALLS.values()))
    for how in ("killed", "stopped", "backward"):
        found.add(how, 2, "alone", {"how": how}, seconds=20)
    found.add("windows", 2, "alone", {"how": "killed", "patch": "window", "options": {"size": 4}}, seconds=20)
    found.add("whole", 1, "command", finetune("--batch-size", "4", "--output-dir", "whole"))
    found.add("half", 2, "command", finetune("--batch-size", "4", *split, "--output-dir", "half"))
    found.add("both", 4, "command", finetune("--batch-size", "2", *split, "--output-dir", "both"))
    stopped = ("--batch-size", "4", "--output-dir", "stopped", "--resume")
    found.add("stopped run", 2, "command", {**finetune(*stopped, *split), "kill": 4})
    found.add("resumed run", 1, "command", finetune(*stopped))
    found.add("curve", 1, "command", perplexity("--output-dir", "curve"))
    found.add("shared curve", 2, "command", perplexity("--output-dir", "shared-curve"))
    found.add("split curve", 2, "command", perplexity("--context-parallel", "--output-dir", "split-curve"))
    return found


def names(mapping):
    return pytest.mark.parametrize("index", range(len(mapping)), ids=list(mapping))


def check_whole(result):
    assert result["loss"] < 1e-12
    assert result["logits"] < 1e-6  # RMSNorm rounds to float32
    assert result["gradients"] < 1e-7


@names(CASES)
def test_losses_and_gradients_are_those_of_whole_rows(jobs, index):
    for rank in range(2):
        check_whole(jobs.results("two", rank)[index])


@names(FOUR)
def test_so_they_are_over_four_processes(jobs, index):
    for rank in range(4):
        check_whole(jobs.results("four", rank)[index])


@names(SOME[:3])
def test_layers_that_are_computed_again_exchange_again(jobs, index):
    again = jobs.results("again")[index]
    assert again["loss"] < 1e-12
    assert again["gradients"] < 1e-7
    assert again["sent"][1] > jobs.results("two")[list(CASES).index(SOME[index])]["sent"][1]


@names(SOME)
def test_in_float32_they_are_within_a_hundred_thousandth(jobs, index):
    for rank in range(2):
        result = jobs.results("float32", rank)[index]
        assert result["loss"] < 1e-5
        assert result["logits"] < 1e-5
        assert result["gradients"] < 1e-5


@names(SOME[3:])
def test_in_bfloat16_they_differ_by_its_rounding(jobs, index):
    for rank in range(2):
        result = jobs.results("bfloat16", rank)[index]
        assert result["logits"] < 0.05
        assert result["gradients"] < 0.05


@names(FAMILIES)
def test_families(jobs, index):
    result = jobs.results("families")[index]
    assert result["loss"] < 1e-9
    assert result["gradients"] < 1e-6


@names(SOME)
def test_what_is_kept_for_the_backward_falls_with_the_processes(jobs, index):
    for rank in range(4):
        kept = jobs.results("long", rank)[index]["kept"]
        assert kept < (0.6 if SOME[index] == "hybrid of layers" else 0.4)  # softmax has all keys


def test_states_are_exchanged_once_forward_and_once_backward(jobs):
    layers, rows, heads, dim, size = 2, 2, 2, 8, 8
    state = layers * rows * heads * dim * (dim + 1) * size
    for world, run in ((2, "two"), (4, "four")):
        for rank in range(world):
            sent = jobs.results(run, rank)[0]["sent"]  # elu1
            assert sent == [state * (world - 1)] * 2


def test_a_window_exchanges_its_last_tokens_alone(jobs):
    index = list(CASES).index("window")
    layers, rows, heads, dim, size = 2, 2, 2, 8, 8
    tokens = layers * rows * heads * 6 * 2 * dim * size
    sent = [jobs.results("two", rank)[index]["sent"] for rank in range(2)]
    assert sent == [[tokens, 0], [0, tokens]]


@names(REFUSED)
def test_what_cannot_be_split_is_refused_in_one_line_by_all(jobs, index):
    text = list(REFUSED.values())[index][1]
    for rank in range(2):
        _, message, unchanged = jobs.results("refused", rank)[index]
        assert text in message
        assert "\n" not in message
        assert unchanged


@names(HEADS)
def test_heads_that_two_processes_share(jobs, index):
    for rank in range(2):
        result = jobs.results("heads", rank)[index]
        exact = {key: result.pop(key) for key in ("start", "unpatched", "generated", "saved")}
        assert exact == dict.fromkeys(exact, True)
        check_whole(result)


@names(CALLS)
def test_calls_that_a_part_of_a_row_cannot_be(jobs, index):
    for rank in range(2):
        name, message = jobs.results("calls", rank)[index]
        assert name == "UnsupportedCallError"
        assert list(CALLS.values())[index][1] in message


@pytest.mark.parametrize("how", ["killed", "stopped", "backward", "windows"])
def test_a_process_that_is_lost_ends_the_others_with_one_line(jobs, how):
    assert jobs.exits(how) == [0, "stopped" if how == "stopped" else -9]
    [[name, message]] = jobs.results(how)
    assert name == "ProcessLostError"
    assert "process 0 of 2 waited for the others in vain" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["half", "both", "resumed run"])
def test_finetune_learns_what_one_process_learns(jobs, name):
    for rank in range(len(jobs.exits(name))):
        assert jobs.results(name, rank)[0]["status"] == 0, jobs.results(name, rank)[0]["stderr"]
    folder = "stopped" if name == "resumed run" else name
    whole, split = (rows_of(jobs.folder / each) for each in ("whole", folder))
    assert [row["tokens"] for row in split] == [row["tokens"] for row in whole]
    for column in ("loss", "eval_loss", "grad_norm"):
        numbers = [[float(row[column]) for row in rows if row[column]] for rows in (whole, split)]
        assert numbers[1] == pytest.approx(numbers[0], rel=1e-5)
    trained = [load_file(jobs.folder / each / "model.safetensors") for each in ("whole", folder)]
    for key, weight in trained[0].items():
        assert torch.allclose(trained[1][key], weight, atol=2e-4), key


def test_finetune_says_what_was_exchanged(jobs):
    results = json.loads((jobs.folder / "half" / "results.json").read_text())
    sent = results["context_parallel"]["bytes_per_step"]
    assert sent > 0
    assert f"a step sent {sent:,} bytes between them" in jobs.results("half")[0]["stdout"]
    both = json.loads((jobs.folder / "both" / "results.json").read_text())
    assert both["context_parallel"] == {"processes": 2, "bytes_per_step": sent}
    assert both["global_batch"] == results["global_batch"] == 4
    assert "context_parallel" not in json.loads((jobs.folder / "whole" / "results.json").read_text())


def test_a_killed_finetune_leaves_its_checkpoint_and_one_line(jobs):
    assert jobs.exits("stopped run") == [0, -9]
    result = jobs.results("stopped run")[0]
    assert result["status"] == 1
    assert result["stderr"].count("error: ") == 1
    assert "waited for the others in vain" in result["stderr"]


def test_perplexity_is_that_of_one_process(jobs):
    one, two = (
        json.loads((jobs.folder / each / "results.json").read_text()) for each in ("curve", "split-curve")
    )
    for rank in range(2):
        assert jobs.results("split curve", rank)[0]["status"] == 0
    for row, split in zip(one["rows"], two["rows"], strict=True):
        assert split["nats"] == pytest.approx(row["nats"], abs=1e-5)
        assert split["stderr"] == pytest.approx(row["stderr"], rel=1e-3)
        for bucket, part in zip(row["buckets"], split["buckets"], strict=True):
            assert part["nats"] == pytest.approx(bucket["nats"], abs=1e-5)
    sent = two["run"]["bytes_exchanged"]
    assert len(sent) == len(two["rows"])
    assert f"{next(iter(sent.values())):,}" in jobs.results("split curve")[0]["stdout"]


def test_windows_that_two_processes_share_out_have_the_perplexity_of_one_process(jobs):
    one, two = (
        json.loads((jobs.folder / each / "results.json").read_text()) for each in ("curve", "shared-curve")
    )
    for rank in range(2):
        assert jobs.results("shared curve", rank)[0]["status"] == 0
    assert two["run"]["processes"] == 2
    for key in ("rows", "data", "arguments", "models", "versions"):
        assert two[key] == one[key]
    assert "byte_ppl" in jobs.results("shared curve")[0]["stdout"]
    assert "byte_ppl" not in jobs.results("shared curve", 1)[0]["stdout"]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), ProcessLostError),
        (torch.distributed.DistNetworkError("recvValue failed"), ProcessLostError),
        (RuntimeError("weights could not be restored"), RuntimeError),
        (TrainingError("the loss is nan; NCCL"), TrainingError),
    ],
)
def test_only_what_a_lost_process_causes_is_called_so(error, raised):
    with pytest.raises(RuntimeError) as caught, lost_processes(0, 2):
        raise error
    assert caught.type is raised
    with pytest.raises(type(error)), lost_processes(0, 1):
        raise error


def test_rows_need_a_group_of_processes():
    with pytest.raises(OptionError, match="there is none: start several processes"):
        Shard.of()


@pytest.mark.full
def test_every_causal_type_is_the_same_or_refused(tmp_path):
    found = Jobs(tmp_path)
    found.add("census", 2, "census", {"patch": "elu1"}, seconds=1000)
    found.run()
    assert found.exits("census") == [0, 0]
    for rank in range(2):
        [verdicts] = found.results("census", rank)
        kinds = [verdict.partition(":")[0] for verdict in verdicts.values()]
        assert "wrong" not in kinds, verdicts
        assert kinds.count("same") >= 80


@pytest.mark.full
def test_a_million_tokens_over_two_processes(tmp_path):
    found = Jobs(tmp_path)
    make_workplace(tmp_path)
    words = random.Random(0).choices(["the", "cat", "sat", "on", "mat", "and", "ran", "to", "log"], k=300_000)
    (tmp_path / "long.txt").write_text(" ".join(words)[:MILLION])
    common = ["--model", "model", "--data", "long.txt", "--max-tokens", "all", "--bos", "no"]
    common += ["--patch", "window+gated", "--options", '{"size": 16, "sinks": 2}']
    whole = [*common, "--stream", "--output-dir", "stream"]
    split = [
        *common,
        "--lengths",
        str(MILLION),
        "--stride",
        "full",
        "--context-parallel",
        "--output-dir",
        "split",
    ]
    found.add("stream", 1, "command", {"name": "perplexity", "argv": whole}, seconds=1000)
    found.add("split", 2, "command", {"name": "perplexity", "argv": split}, seconds=1000)
    found.run()
    rows = {name: json.loads((tmp_path / name / "results.json").read_text()) for name in ("stream", "split")}
    [one] = rows["split"]["rows"]
    parts = rows["stream"]["rows"]
    assert one["tokens"] == sum(row["tokens"] for row in parts) == MILLION - 1
    mean = sum(row["nats"] * row["tokens"] for row in parts) / one["tokens"]
    assert one["nats"] == pytest.approx(mean, abs=1e-5)
    [sent] = rows["split"]["run"]["bytes_exchanged"].values()
    assert sent < 100_000  # states and windows, whatever the length
