"""The small model that learns to recall: it trains, and its rows repeat a segment."""

import random

import recall_model
import torch
from transformers import AutoTokenizer, LlamaForCausalLM


def test_it_trains_on_rows_that_repeat(tmp_path):
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. é " * 20)
    argv = ["--data", str(tmp_path / "text.txt"), "--steps", "2", "--output-dir", str(tmp_path / "model")]
    assert recall_model.main(argv) == 0
    model, tokenizer = (x.from_pretrained(tmp_path / "model") for x in (LlamaForCausalLM, AutoTokenizer))
    assert tokenizer("é")["input_ids"][0] == recall_model.BOS
    rows = recall_model.batch(torch.zeros(100, dtype=torch.long), random.Random(0))
    assert model(rows).logits.shape == (recall_model.ROWS, recall_model.LENGTH, 257)
    shortest, longest = recall_model.SEGMENTS
    for row in rows[1:4]:
        repeats = [k for k in range(shortest, longest + 1) if torch.equal(row[1 + k :], row[1:-k])]
        assert repeats, "no segment comes again"
