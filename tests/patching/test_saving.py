"""Saving that fails or is killed: the folder has its old files or all of the new ones, and says which."""

import copy
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.kinds import patched_model, plain_model
from helpers.learned_patches import logits
from helpers.tiny_models import tokens
from torch import nn
from transformers import AutoModelForCausalLM, modeling_utils

from hf_linattn import describe, from_pretrained, is_patched, patch_model, unpatch_model
from hf_linattn.errors import CheckpointError, UnsupportedModelError

IDS = tokens(1, 30)
LOADERS = (from_pretrained, AutoModelForCausalLM.from_pretrained)
INDEX = "model.safetensors.index.json"


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


KILLED = """
import os, signal, sys
from transformers import modeling_utils
from hf_linattn import from_pretrained, patch_model
write, shards = modeling_utils.safe_save_file, []
def dying(*args, **kwargs):
    write(*args, **kwargs)
    shards.append(args)
    if len(shards) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
modeling_utils.safe_save_file = dying
model = patch_model(from_pretrained(sys.argv[1]), "softmax1")
for folder in sys.argv[1:]:
    child = os.fork()
    if not child:
        model.save_pretrained(folder, max_shard_size="10KB")
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.usefixtures("warm_start")
def test_killed_while_saving(tmp_path):
    model = patched_model("hybrid")
    old, new = tmp_path / "old", tmp_path / "new"
    model.save_pretrained(old)
    before = content(old)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, old, new], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(-signal.SIGKILL)] * 2, done.stderr
    assert content(old).items() > before.items()
    for load in LOADERS:
        assert torch.equal(logits(load(old), IDS), logits(model, IDS))
        with pytest.raises((CheckpointError, ValueError), match=r"config\.json"):
            load(new)
    for folder in (old, new):
        model.save_pretrained(folder)
        assert torch.equal(logits(from_pretrained(folder), IDS), logits(model, IDS))
        assert content(folder) == before


@pytest.mark.parametrize("there", [True, False], ids=["over another model", "new folder"])
def test_a_full_disk_leaves_the_folder_as_it_was(there, tmp_path, monkeypatch):
    def full(tensors, path, **kwargs):
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = patched_model("gated")
    target = tmp_path / "a" / "b"
    if there:
        patched_model("linear").save_pretrained(target)
    before = content(tmp_path)
    monkeypatch.setattr(modeling_utils, "safe_save_file", full)
    with pytest.raises(CheckpointError, match=f"cannot write {target}: No space left"):
        model.save_pretrained(target)
    assert content(tmp_path) == before
    assert target.exists() == there
    assert is_patched(model)


def test_the_folder_of_a_run_has_no_old_entry_beside_new_weights(tmp_path):
    shards = {"max_shard_size": "10KB"}
    for kind, options in (("hybrid", {}), ("linear", shards), ("gated", shards), ("scores", {})):
        model = patched_model(kind)
        with torch.no_grad():
            model.lm_head.weight.mul_(1 + len(kind))  # other weights under the same names
        model.save_pretrained(tmp_path, **options)
        loaded = from_pretrained(tmp_path)
        assert str(describe(loaded)) == str(describe(model))
        assert torch.equal(logits(loaded, IDS), logits(model, IDS))
        assert (tmp_path / INDEX).exists() == bool(options)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    model.save_pretrained(str(tmp_path), True, model.state_dict(), False, "10KB")  # by position
    assert (tmp_path / INDEX).exists()
    for stale in tmp_path.glob("model*"):
        stale.unlink()
    plain_model("linear").save_pretrained(tmp_path)
    assert not is_patched(from_pretrained(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*file: a file of this name"):
        model.save_pretrained(tmp_path / "file")


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


HALVES = {
    "no shards": lambda folder, shard: [path.unlink() for path in folder.glob("*.safetensors")],
    "a shard missing": lambda folder, shard: shard.unlink(),
    "a shard cut": lambda folder, shard: cut(shard, -9),
    "an empty shard": lambda folder, shard: cut(shard, 0),
    "no index": lambda folder, shard: (folder / INDEX).unlink(),
    "index cut": lambda folder, shard: cut(folder / INDEX, 40),
    "an empty index": lambda folder, shard: (folder / INDEX).write_text("{}"),
    "another index": lambda folder, shard: (folder / INDEX).write_text("[]"),
    "index without shards": lambda folder, shard: (folder / INDEX).write_text(json.dumps({"weight_map": 3})),
}


@pytest.mark.parametrize("half", HALVES)
def test_a_folder_half_written_by_others(half, tmp_path):
    patched_model("hybrid").save_pretrained(tmp_path, max_shard_size="10KB")
    HALVES[half](tmp_path, min(tmp_path.glob("*.safetensors")))
    before = content(tmp_path)
    for load in LOADERS:
        with pytest.raises(CheckpointError, match=f"{tmp_path}: the weights cannot be read") as caught:
            load(tmp_path)
        assert "\n" not in str(caught.value)
    assert content(tmp_path) == before
    model = patch_model(plain_model("linear"), "elu1")  # a failed load leaves nothing behind for others
    assert torch.isfinite(logits(model, IDS)).all()


def test_a_part_that_is_patched_by_itself_is_not_lost_with_the_whole(tmp_path):
    model = plain_model("linear")
    patch_model(model.model, "gated")
    with pytest.raises(CheckpointError, match=r"'model' of this LlamaForCausalLM is patched by itself"):
        model.save_pretrained(tmp_path / "whole")
    assert not list(tmp_path.iterdir())
    model.model.save_pretrained(tmp_path / "part")
    assert is_patched(from_pretrained(tmp_path / "part"))
    unpatch_model(model.model)
    model.save_pretrained(tmp_path / "whole")


CHANGES = {
    "a copy": lambda layers: [*layers, copy.deepcopy(layers[0])],
    "another order": lambda layers: layers[::-1],
    "the first taken out": lambda layers: layers[1:],
    "the last taken out": lambda layers: layers[:-1],
}


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_changed_places_are_not_saved_as_those_of_before(change, tmp_path):
    model, plain = patch_model(plain_model("linear"), "softmax1"), plain_model("linear")
    layers = list(model.model.layers)
    for each in (model, plain):
        each.model.layers = nn.ModuleList(CHANGES[change](list(each.model.layers)))
        each.config.num_hidden_layers = len(each.model.layers)
        for index, layer in enumerate(each.model.layers):
            layer.self_attn.layer_idx = index
    with pytest.raises(CheckpointError, match=r"nothing was saved: .* \(model\.layers\.\d\.self_attn\)"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    if change == "a copy":
        for undo in (unpatch_model, lambda model: patch_model(model, "elu1")):
            with pytest.raises(UnsupportedModelError, match=r"self_attn was copied with its patch"):
                undo(model)
            assert is_patched(model)
        model.model.layers = nn.ModuleList(layers)
        model.save_pretrained(tmp_path)
    else:
        assert torch.equal(logits(unpatch_model(model), IDS), logits(plain, IDS))
