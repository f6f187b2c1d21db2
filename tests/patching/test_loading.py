"""Loading configs and tokenizers."""

import os
from pathlib import Path

import pytest

from hf_linattn import from_pretrained
from hf_linattn.errors import CheckpointError, DataError, PlanError, TrainingError
from hf_linattn.finetune.model import load_config as load_config_to_train
from hf_linattn.patching.loading import explain_missing, first_line, load_config, load_tokenizer

BASE = str(Path(__file__).parents[2] / "examples/base")


def test_what_is_there():
    assert load_config(BASE).model_type == "llama"
    assert load_tokenizer(BASE).encode("a")


@pytest.mark.parametrize(
    ("load", "source", "kind", "message"),
    [
        (load_config, "/nowhere", CheckpointError, "no such folder: /nowhere"),
        (load_config, "nowhere/at-all", CheckpointError, "no model at 'nowhere/at-all': "),
        (load_tokenizer, "nowhere/at-all", DataError, "no folder nowhere/at-all, and no tokenizer"),
        (load_tokenizer, str(Path(__file__).parent), DataError, "give one with --tokenizer"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(load, source, kind, message):
    with pytest.raises(kind, match=message) as caught:
        load(source)
    assert "\n" not in str(caught.value)


def test_a_folder_above_the_model_says_where_it_is(tmp_path):
    for stage in ("transfer", "finetune"):
        (tmp_path / stage).mkdir()
        (tmp_path / stage / "config.json").write_text("{}")
    os.utime(tmp_path / "transfer" / "config.json", (0, 0))
    for load in (load_config, from_pretrained):
        with pytest.raises(CheckpointError, match=r"the model is in .*finetune\)"):
            load(str(tmp_path))


@pytest.mark.parametrize("load", [load_config, load_tokenizer, from_pretrained, load_config_to_train])
def test_a_file_is_called_one(load, tmp_path):
    (tmp_path / "some.txt").write_text("Once upon a time.")
    with pytest.raises((CheckpointError, DataError, TrainingError), match="is a file: a model is a folder"):
        load(str(tmp_path / "some.txt"))


@pytest.mark.parametrize("load", [load_config, from_pretrained])
def test_the_folder_of_an_adapter_is_called_one(load, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"a peft adapter: load its base .*merge_and_unload") as caught:
        load(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_errors_of_this_package_pass():
    with pytest.raises(PlanError), explain_missing("no model", CheckpointError):
        raise PlanError("empty")
    with (
        pytest.raises(CheckpointError, match="no model: KeyError"),
        explain_missing("no model", CheckpointError),
    ):
        raise KeyError


def test_an_error_is_cut_to_its_first_line():
    assert first_line(ValueError(" one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"
