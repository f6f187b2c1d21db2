"""Model cards: in every folder that a command leaves, with metadata as the Hub takes it."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

import json
import math
import re
from pathlib import Path

import pytest
import yaml
from helpers.fixtures_finetune import SHORT, finished, surroundings, workplace
from huggingface_hub import ModelCard

from hf_linattn import describe, from_pretrained
from hf_linattn.convert.__main__ import main as convert
from hf_linattn.finetune.__main__ import main
from hf_linattn.finetune.card import write_card

pytestmark = pytest.mark.usefixtures("surroundings")


def metadata(folder):
    """The front matter, by another reader than the one that wrote it."""
    front = re.match(r"---\n(.*?)\n---\n", (Path(folder) / "README.md").read_text(), re.DOTALL)
    return yaml.safe_load(front[1])


def test_finetune_leaves_a_card_with_what_was_measured(finished):
    card = ModelCard.load(finished / "README.md")
    assert metadata(finished) == card.data.to_dict()
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["hf_linattn"]
    assert "base_model" not in metadata(finished)  # a local folder is no name on the Hub
    results = json.loads((finished / "results.json").read_text())
    assert results["command"] in card.text
    assert "Data: `train.txt`; each document is preceded by the BOS token" in card.text
    loss = results["eval_loss"]
    assert f"| trained | {loss:.4f} | {math.exp(loss):.4g} |" in card.text
    assert f"| finished | {results['tokens']:,} | 10 | 4 x 32 | 0.01 |" in card.text


def test_convert_names_base_patch_and_stages_and_its_card_loads_it(workplace):
    Path("model/README.md").write_text("---\nbase_model: some/model\nlicense: mit\n---\nA model.\n")
    argv = ["--model", "model", "--data", "train.txt", "--eval-data", "eval.txt", "--no-dropout", "--cpu"]
    argv += ["--patch", '{"0": ["window+hedgehog", {"size": 8}], "1": "elu1"}', "--lora", "0"]
    argv += ["--block-size", "32", "--batch-size", "4", "--transfer-tokens", "256", "--distill-tokens", "384"]
    try:
        assert convert([*argv, "--output-dir", "carded"]) == 0
    finally:
        Path("model/README.md").unlink()
    for stage in ("transfer", "distill"):
        found = metadata(f"carded/{stage}")
        assert found["base_model"] == "some/model"
        assert found["license"] == "mit"
        assert found["tags"] == ["hf_linattn", "elu1", "hedgehog", "window"]
    text = Path("carded/distill/README.md").read_text()
    losses = json.loads(Path("carded/validation.json").read_text())
    assert f"| original | {losses['original']:.4f} |" in text
    assert f"| after distill | {losses['distill']:.4f} |" in text
    assert '| `window+hedgehog` | `{"window": {"size": 8}}` | 1 |' in text
    assert "| transfer | 256 | 2 |" in text
    assert "| distill | 384 | 3 |" in text
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    assert 'from_pretrained("distill")' in code
    names = {"from_pretrained": from_pretrained}
    exec(code.replace('"distill"', '"carded/distill"'), names)
    assert [row.patch for row in describe(names["model"])] == ["window+hedgehog", "elu1"]


def test_names_of_the_hub_are_in_the_metadata(workplace, finished, tmp_path):
    results = json.loads((finished / "results.json").read_text())
    results["arguments"] |= {"data": "wikitext:wikitext-103-raw-v1"}
    (tmp_path / "config.json").write_text("{}")
    bases = {
        "Qwen/Qwen3-0.6B": "Qwen/Qwen3-0.6B",
        "Qwen/Some-GGUF/file.gguf": "Qwen/Some-GGUF",
        "/gone/model": None,
        "a/b/c": None,
    }
    for base, name in bases.items():
        write_card(tmp_path, base, "the command", [results], {}, "loss (nats per token)")
        assert metadata(tmp_path).get("base_model") == name
        assert metadata(tmp_path)["datasets"] == ["wikitext"]
        assert "No text was given for validation." in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("part", "task"), [("vision_config", "image-text-to-text"), ("audio_config", "audio-text-to-text")]
)
def test_the_task_is_that_of_what_a_model_reads(part, task, workplace, finished, tmp_path):
    results = json.loads((finished / "results.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({part: {}}))
    write_card(tmp_path, "a/b", "the command", [results], {}, "loss (nats per token)")
    assert metadata(tmp_path)["pipeline_tag"] == task


def test_a_readme_of_other_hands_is_not_overwritten(workplace, capsys):
    Path("noted").mkdir()
    Path("noted/README.md").write_text("mine")
    assert main([*SHORT, "--output-dir", "noted"]) == 1
    assert "holds README.md but no run of this command" in capsys.readouterr().err
    assert Path("noted/README.md").read_text() == "mine"
