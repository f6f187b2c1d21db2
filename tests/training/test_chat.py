"""Rows of messages: which tokens are the assistant's, the losses on them alone, and what is refused."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.chat import BROKEN, FORGETFUL, MARKED, PLAIN, TWO_TURNS, byte_tokenizer, learned
from helpers.fixtures_finetune import BASE, rows_of, surroundings, workplace
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_linattn.convert.__main__ import main as convert
from hf_linattn.convert.distillation import DistillationLoss
from hf_linattn.data import count_targets, load_blocks, load_documents, token_ids
from hf_linattn.data.chat import ChatTokens
from hf_linattn.errors import DataError
from hf_linattn.finetune.__main__ import main
from hf_linattn.training.chat import chosen_losses, fit_objective, prepare
from hf_linattn.training.loop import batch_rows, row_weights
from hf_linattn.training.objectives import build_objective

pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def encoded(template, messages):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return [learned(tokenizer, ids) for ids in ChatTokens(tokenizer)(messages, "chat.jsonl[0]")]


def test_the_difference_to_the_prompt_is_learned():
    text = "<user>hi</>\n<assistant>yes</>\n<user>so</>\n<assistant>no</>\n"
    mask = "." * 23 + "yes</>\n" + "." * 23 + "no</>\n"
    assert encoded(PLAIN, TWO_TURNS) == [(text, mask)]


def test_the_marks_of_a_template_decide():
    text = "<user>hi</>\n<assistant>yes</>\n<user>so</>\n<assistant>no</>\n"
    mask = "." * 23 + "yes</>" + "." * 24 + "no</>" + "."
    assert encoded(MARKED, TWO_TURNS) == [(text, mask)]


def test_a_template_that_forgets_thoughts_gives_a_conversation_a_turn():
    first = "<user>hi</>\n<assistant>(thought)yes</>\n"
    second = "<user>hi</>\n<assistant>yes</>\n<user>so</>\n<assistant>(thought)no</>\n"
    assert encoded(FORGETFUL, TWO_TURNS) == [
        (first, "." * 26 + "ought)yes</>\n"),
        (second, "." * 56 + "ought)no</>\n"),
    ]


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (PLAIN, TWO_TURNS[:1], r"chat\.jsonl\[0\] has no message of the assistant"),
        (PLAIN, [], "has no message of the assistant"),
        (PLAIN, "hello", "holds no messages: a list of {role, content}"),
        (PLAIN, [{"content": "a"}], "holds no messages"),
        (BROKEN, TWO_TURNS, r"chat\.jsonl\[0\]: the tokenizer's chat template fails: roles must alternate"),
        ("{% for %}", TWO_TURNS, "chat template fails: "),
        ("{{ messages[0].content + 3 }}", TWO_TURNS, "chat template fails: "),
        (MARKED.replace("== 'assistant'", "== 'bot'"), TWO_TURNS, "marks no token as the assistant's"),
        (None, TWO_TURNS, "has no chat template"),
    ],
)
def test_what_cannot_be_encoded_is_one_line(template, messages, message):
    with pytest.raises(DataError, match=message) as caught:
        encoded(template, messages)
    assert "\n" not in str(caught.value)


def write_chat(folder, rows=40):
    """Conversations of different lengths in chat.jsonl; in chatty/ the model's tokenizer with a template."""
    words = ["the", "cat", "sat", "on", "the", "mat", "and", "the", "dog", "ran"]
    with (folder / "chat.jsonl").open("w") as file:
        for row in range(rows):
            said = " ".join(words[: 1 + row % 9])
            turn = [{"role": "user", "content": said * (1 + row % 3)}, {"role": "assistant", "content": said}]
            file.write(json.dumps({"messages": turn * (1 + row % 2), "source": "test"}) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = PLAIN
    tokenizer.save_pretrained(folder / "chatty")


@pytest.fixture(scope="module")
def chat(workplace):
    write_chat(workplace)
    return workplace


def blocks_of(folder, size=32, **more):
    return load_blocks(folder / "chat.jsonl", AutoTokenizer.from_pretrained(folder / "chatty"), size, **more)


def test_blocks_join_the_conversations_and_each_has_a_target(chat):
    tokenizer = AutoTokenizer.from_pretrained(chat / "chatty")
    rows = [json.loads(line)["messages"] for line in (chat / "chat.jsonl").read_text().splitlines()]
    whole = "".join(tokenizer.apply_chat_template(row, tokenize=False) for row in rows)
    ids = np.array(tokenizer(whole)["input_ids"])
    blocks = blocks_of(chat)
    assert count_targets(blocks).min() >= 1
    cut = ids[: len(ids) // 32 * 32].reshape(-1, 32)
    kept = [row for row in cut.tolist() if row in token_ids(blocks).tolist()]
    assert token_ids(blocks).tolist() == kept
    assert np.array_equal(blocks_of(chat, column="messages", stream=True), blocks)
    with pytest.raises(DataError, match="has no column 'text'; it has messages, source"):
        load_documents(chat / "chat.jsonl")


def test_losses_are_means_over_the_assistants_tokens(chat):
    """Of a batch, against sums in float64 token by token; so is the divergence, and its weighted mean."""
    blocks = blocks_of(chat)[:6]
    objective = build_objective("causal", AutoTokenizer.from_pretrained(chat / "chatty"), 32, 0)
    objective = fit_objective(objective, blocks)
    model, teacher = (AutoModelForCausalLM.from_pretrained(chat / "model").eval().double() for _ in range(2))
    with torch.no_grad():
        teacher.lm_head.weight.mul_(1.5)
    ids = torch.from_numpy(token_ids(blocks)).long()
    logp, other = (m(ids).logits.log_softmax(-1).detach() for m in (model, teacher))
    batch = torch.from_numpy(prepare(blocks, np.arange(6), 1)).long()
    total, divergence, count = 0.0, 0.0, 0
    for row in range(6):
        for place in range(1, 32):
            if blocks[row, place] >= 0:
                total -= logp[row, place - 1, blocks[row, place]].item()
                divergence += F.kl_div(
                    logp[row, place - 1], other[row, place - 1], log_target=True, reduction="sum"
                ).item()
                count += 1
    weights = torch.from_numpy(row_weights(blocks, count_targets))
    assert (chosen_losses(model, batch).double() * weights).mean().item() == pytest.approx(
        total / count, rel=1e-5
    )
    loss = DistillationLoss(lambda ids: teacher(ids).logits, objective=objective, ce_weight=2.0)
    want = (divergence + 2 * total) / count
    assert (loss(model, batch).double() * weights).mean().item() == pytest.approx(want, rel=1e-5)


def test_finetune_reports_the_mean_over_the_tokens_of_a_batch(chat):
    argv = [*BASE, "--data", "chat.jsonl", "--tokenizer", "chatty", "--no-dropout", "--max-steps", "4"]
    argv += ["--eval-data", "chat.jsonl", "--eval-every", "2", "--checkpoint-every", "1"]
    assert main([*argv, "--output-dir", "told"]) == 0
    blocks, model = blocks_of(chat), AutoModelForCausalLM.from_pretrained(chat / "model").eval()
    rows = blocks[batch_rows(1, 4, len(blocks), 0)]
    ids, learned = torch.from_numpy(token_ids(rows)).long(), torch.from_numpy(rows[:, 1:] >= 0)
    nll = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    want = nll[learned.flatten()].mean().item()
    assert float(rows_of("told")[1]["loss"]) == pytest.approx(want, rel=1e-5)
    results = json.loads((chat / "told" / "results.json").read_text())
    assert "the assistant's tokens alone" in results["documents"]
    assert results["eval_loss"] < results["eval_loss_before"]
    # in other shares, the same update
    assert main([*argv, "--batch-size", "2", "--grad-accum", "2", "--output-dir", "shares"]) == 0
    for row, other in zip(rows_of("told"), rows_of("shares"), strict=True):
        assert float(row["loss"] or 0) == pytest.approx(float(other["loss"] or 0), rel=1e-4)


def test_convert_learns_from_chat_in_every_stage(chat):
    argv = ["--model", "model", "--tokenizer", "chatty", "--data", "chat.jsonl", "--eval-data", "chat.jsonl"]
    argv += ["--patch", "hedgehog", "--no-dropout", "--block-size", "32", "--batch-size", "4", "--cpu"]
    argv += [f"--{stage}-tokens={4 * 4 * 32}" for stage in ("transfer", "distill", "finetune")]
    assert convert([*argv, "--ce-weight", "1", "--output-dir", "converted"]) == 0
    losses = json.loads((chat / "converted" / "validation.json").read_text())
    assert losses["finetune"] < losses["swapped"]


def test_a_tokenizer_without_a_template_is_one_line(chat, capsys):
    assert main([*BASE, "--data", "chat.jsonl", "--max-steps", "1", "--output-dir", "refused"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: the tokenizer model has no chat template")
    assert not Path("refused/train.csv").exists()
