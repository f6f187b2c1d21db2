"""Uploading and downloading a patched model by huggingface_hub's own client, to a stand-in of the hub."""

import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import hub, tiny_models

from hf_linattn import describe, from_pretrained, patch_model

CLIENT = """
import sys, torch
from pathlib import Path
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoModelForCausalLM
from hf_linattn import describe, from_pretrained, is_patched

folder, other = map(Path, sys.argv[1:])
model = from_pretrained(folder)
ids = torch.arange(3, 60)[None]
want = model(ids).logits
model.push_to_hub("me/whole")
model.save_pretrained(other / "mine", push_to_hub=True, repo_id="team/sharded", max_shard_size="10KB")
for load in (from_pretrained, AutoModelForCausalLM.from_pretrained):
    assert torch.equal(load(other / "mine")(ids).logits, want)
    for name in ("me/whole", "team/sharded"):
        got = load(name)
        assert str(describe(got)) == str(describe(model)) and torch.equal(got(ids).logits, want)
snapshot_download("team/sharded", local_dir=other / "snapshot")
for call in (
    lambda: model.push_to_hub("me/locked"),
    lambda: model.save_pretrained(other / "kept", push_to_hub=True, repo_id="me/locked"),
):
    try:
        call()
    except HfHubHTTPError as error:
        print(str(error).splitlines()[-1])
assert is_patched(model) and torch.equal(model(ids).logits, want)
"""


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_what_is_pushed_is_what_is_saved_and_comes_back(tmp_path):
    plan = {"0": "hedgehog", "1": "softmax1", "2": "gated", "3": ("window+elu1", {"size": 8})}
    model = patch_model(tiny_models.llama(4, dtype=torch.float32), plan)
    model.save_pretrained(tmp_path / "saved")
    env = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")}
    env |= {
        "HF_TOKEN": "hf_of_nobody",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DISABLE_SAFETENSORS_CONVERSION": "1",
    }
    with hub.running() as server:
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, tmp_path / "saved", tmp_path],
            env={**env, "HF_ENDPOINT": server.url}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("locked") == 2, done.stdout
    arrived = server.repos["me/whole"]
    saved = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    assert arrived.keys() - saved.keys() == {"README.md"}
    assert arrived.items() >= saved.items()
    assert json.loads(arrived["config.json"])["linattn"]["patches"][0]["patch"] == "hedgehog"
    assert sum(name.endswith(".safetensors") for name in server.repos["team/sharded"]) > 2
    want = model(tiny_models.tokens(1, 20)).logits
    for folder in ("snapshot", "kept"):
        loaded = from_pretrained(tmp_path / folder)
        assert str(describe(loaded)) == str(describe(model))
        assert torch.equal(loaded(tiny_models.tokens(1, 20)).logits, want)
