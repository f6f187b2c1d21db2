"""lm_eval on patched models: its numbers against plain torch; folders, padding, refusals."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

from __future__ import annotations

import pytest
import torch
from helpers.fixtures_harness import WARNINGS, folder, lm_class, patched, request, tokenizer
from helpers.tiny_models import grow
from transformers import AutoTokenizer

from hf_linattn import bypassed, describe, from_pretrained, patch_model
from hf_linattn.errors import CheckpointError, DataError, OptionError, UnsupportedModelError

PROMPTS = ["a", "one two three", "Wörter", "the sky is"]
ENDINGS = [" apple pie", " b", "c", " blue as ever"]
TEXT = " ".join(f"{n * n % 7} é {n}" for n in range(40))

pytestmark = WARNINGS


def pairs():
    return [request("loglikelihood", *pair) for pair in zip(PROMPTS, ENDINGS, strict=True)]


@torch.no_grad()
def nats_after(model, ids, scored):
    """Sum of log p of the last `scored` ids, in float64, from one forward of this row alone."""
    logits = model(torch.tensor([ids[:-1]])).logits[0].double()
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return float(chosen[-scored:].sum()), bool(
        (logits.argmax(-1)[-scored:] == torch.tensor(ids[-scored:])).all()
    )


@pytest.mark.parametrize("patch", [None, "elu1", "window+elu1", "softmax1+logn"])
def test_loglikelihoods_are_those_of_plain_torch(lm_class, folder, tokenizer, patch):
    options = {"size": 3} if patch == "window+elu1" else {}
    lm = lm_class(str(folder), patch=patch, options=options, batch_size=3)
    model = from_pretrained(folder)
    if patch:
        patch_model(model, patch, options=options)
    found = lm.loglikelihood(pairs(), disable_tqdm=True)
    for prompt, ending, (nats, greedy) in zip(PROMPTS, ENDINGS, found, strict=True):
        ids = tokenizer(prompt + ending)["input_ids"]
        scored = len(ids) - len(tokenizer(prompt)["input_ids"])
        wanted, best = nats_after(model, ids, scored)
        assert nats == pytest.approx(wanted, abs=1e-4)
        assert greedy == best


def test_rolling_scores_every_token_once_in_windows_side_by_side(lm_class, folder, tokenizer):
    length = 32
    lm = lm_class(str(folder), patch="elu1", batch_size=2, max_length=length, add_bos_token=False)
    [found] = lm.loglikelihood_rolling([request("loglikelihood_rolling", TEXT)], disable_tqdm=True)
    model = from_pretrained(folder)
    patch_model(model, "elu1")
    ids = [tokenizer.bos_token_id, *tokenizer(TEXT, add_special_tokens=False)["input_ids"]]
    wanted = 0.0
    for start in range(1, len(ids), length):
        end = min(start + length, len(ids))
        # a last window that is not full reads on to the left, but scores only what is left
        wanted += nats_after(model, ids[max(end - length - 1, 0) : end], end - start)[0]
    assert len(ids) > 3 * length
    assert found == pytest.approx(wanted, abs=1e-3)


def test_rolling_scores_a_bos_that_the_tokenizer_adds(lm_class, folder, tokenizer):
    """What docs/harness.md warns of: BOS after BOS counts as a token of the text."""
    text = TEXT[:30]
    [found] = lm_class(str(folder)).loglikelihood_rolling([request("loglikelihood_rolling", text)])
    ids = tokenizer(text)["input_ids"]
    wanted, _ = nats_after(from_pretrained(folder), [tokenizer.bos_token_id, *ids], len(ids))
    assert found == pytest.approx(wanted, abs=1e-4)


def test_texts_without_a_token(lm_class, folder):
    lm = lm_class(str(folder), patch="elu1", add_bos_token=False)
    assert lm.loglikelihood_rolling([request("loglikelihood_rolling", "")]) == [0]
    [(nats, _)] = lm.loglikelihood([request("loglikelihood", "", "a")])
    assert nats == lm.loglikelihood_rolling([request("loglikelihood_rolling", "a")])[0]


def test_a_patched_folder_is_the_patch_put_on_by_hand(lm_class, folder, tokenizer, tmp_path):
    model = from_pretrained(folder)
    patch_model(model, "logn", options={"train_length": 4})
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    saved = lm_class(str(tmp_path), batch_size=2).loglikelihood(pairs())
    by_dict = lm_class(str(folder), patch="logn", options={"train_length": 4}, batch_size=2)
    by_text = lm_class(str(folder), patch="logn", options='{"train_length": 4}', batch_size=2)
    in_memory = lm_class(model, tokenizer=tokenizer, batch_size=2)
    for lm in (by_dict, by_text, in_memory):
        assert lm.loglikelihood(pairs()) == saved
    assert lm_class(str(folder), batch_size=2).loglikelihood(pairs()) != saved
    assert lm_class(str(folder), patch="logn", batch_size=2).loglikelihood(pairs()) != saved


def test_weights_of_the_patch_come_along_and_the_patch_comes_off(lm_class, patched, folder):
    from lm_eval.models.huggingface import HFLM

    lm = lm_class(str(patched), batch_size=2)
    found = lm.loglikelihood(pairs())
    assert found != lm_class(str(folder), patch="hedgehog", batch_size=2).loglikelihood(pairs())
    plain = HFLM(str(folder), device="cpu", batch_size=2).loglikelihood(pairs())
    assert lm_class(str(patched), patch="unpatched", batch_size=2).loglikelihood(pairs()) == plain != found
    with bypassed(lm.model):
        assert lm.loglikelihood(pairs()) == plain
    assert lm.loglikelihood(pairs()) == found


def test_the_plain_class_gives_a_patched_folder_as_it_was_saved(lm_class, patched):
    from lm_eval.models.huggingface import HFLM

    plain, own = HFLM(str(patched), device="cpu").model, from_pretrained(patched)
    assert str(describe(plain)) == str(describe(own))
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, own(ids).logits)


@pytest.mark.parametrize("patch", [None, "elu1", "window+elu1", "logn", "gated"])
def test_generation_under_left_padding(lm_class, folder, tokenizer, patch):
    """Batches of prompts of different lengths: the text of each alone, by generate and without any cache."""
    lm = lm_class(str(folder), patch=patch, batch_size=4)
    settings = {"max_gen_toks": 12, "until": [], "do_sample": False}
    found = lm.generate_until([request("generate_until", prompt, dict(settings)) for prompt in PROMPTS])
    model = from_pretrained(folder)
    if patch:
        patch_model(model, patch)
    for prompt, text in zip(PROMPTS, found, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        alone = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert text == tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)
        assert torch.equal(alone, grow(model, ids, 12))
    assert len(set(found)) > 1


def test_generation_stops_and_asks_for_room(lm_class, folder):
    lm = lm_class(str(folder), patch="elu1", batch_size=2)
    [whole] = lm.generate_until([request("generate_until", "one", {"max_gen_toks": 12})])
    stop = whole[3]
    [cut] = lm.generate_until([request("generate_until", "one", {"max_gen_toks": 12, "until": [stop]})])
    assert cut == whole[: whole.index(stop)]
    with pytest.raises(OptionError, match=r"some_task.*256 tokens.*max_length 64"):
        lm.generate_until([request("generate_until", "one", {})])


def test_an_answer_longer_than_the_model_reads_is_refused(lm_class, folder):
    lm = lm_class(str(folder), max_length=4)
    with pytest.raises(OptionError, match=r"has 10 tokens, and can have 1 to max_length, which is 4"):
        lm.loglikelihood([request("loglikelihood", "one", " apple pie")])


def test_a_model_that_computes_nan_has_no_accuracy(lm_class, folder, tokenizer):
    model = from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    lm = lm_class(model, tokenizer=tokenizer)
    settings = {"max_gen_toks": 2, "until": [], "do_sample": False}
    for ask, given in (
        (lm.loglikelihood, pairs()),
        (lm.loglikelihood_rolling, [request("loglikelihood_rolling", TEXT)]),
        (lm.generate_until, [request("generate_until", "a", settings)]),
    ):
        with pytest.raises(DataError, match="the weights hold NaN"):
            ask(given, disable_tqdm=True)


def test_an_adapter_goes_on_top_of_the_patch(lm_class, patched, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(0)
    tuned = get_peft_model(from_pretrained(patched), LoraConfig(r=2, target_modules=["q_proj"]))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    tuned.save_pretrained(tmp_path)
    lm = lm_class(str(patched), peft=str(tmp_path))
    assert isinstance(lm.model, PeftModel)
    ids = lm.tok_encode(PROMPTS[1] + ENDINGS[1])
    wanted, _ = nats_after(tuned.eval(), ids, len(ids) - len(lm.tok_encode(PROMPTS[1])))
    [(found, _)] = lm.loglikelihood([request("loglikelihood", PROMPTS[1], ENDINGS[1])])
    assert found == pytest.approx(wanted, abs=1e-4)
    assert found != lm_class(str(patched)).loglikelihood(pairs())[1][0]


def test_half_precision_is_summed_in_float32(lm_class, folder, tokenizer):
    lm = lm_class(str(folder), patch="elu1", dtype="bfloat16", add_bos_token=False)
    assert lm.model.dtype == torch.bfloat16
    [found] = lm.loglikelihood_rolling([request("loglikelihood_rolling", TEXT[:50])])
    ids = [tokenizer.bos_token_id, *tokenizer(TEXT[:50], add_special_tokens=False)["input_ids"]]
    wanted, _ = nats_after(lm.model, ids, len(ids) - 1)
    assert found == pytest.approx(wanted, rel=1e-5)
    coarse = lm_class(str(folder), patch="elu1", dtype="bfloat16", add_bos_token=False, softmax_dtype=None)
    [rounded] = coarse.loglikelihood_rolling([request("loglikelihood_rolling", TEXT[:50])])
    assert abs(rounded - wanted) > abs(found - wanted)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"patch": "elu2"}, ValueError, "elu1"),
        ({"options": {"size": 3}}, OptionError, "patch="),
        ({"patch": "window", "options": "size=3"}, OptionError, "JSON"),
        ({"patch": "window", "options": {"sizes": 3}}, OptionError, "size"),
        ({"delta": "other"}, OptionError, "delta"),
        ({"device": "cuda:99"}, OptionError, "cuda:99"),
        ({"device": "gpu"}, OptionError, "gpu"),
        ({"tokenizer": "./nowhere"}, DataError, "tokenizer="),
    ],
)
def test_refusals(lm_class, folder, arguments, error, words):
    with pytest.raises(error, match=words):
        lm_class(str(folder), **arguments)


def test_more_refusals(lm_class, folder, tokenizer, tmp_path):
    with pytest.raises(CheckpointError, match="no model"):
        lm_class(str(tmp_path / "nowhere"))
    with pytest.raises(OptionError, match="patch_model"):
        lm_class(from_pretrained(folder), patch="elu1", tokenizer=tokenizer)
    bare = AutoTokenizer.from_pretrained(folder)
    bare.bos_token = None
    with pytest.raises(DataError, match="prefix_token_id"):
        lm_class(str(folder), tokenizer=bare)
    assert lm_class(str(folder), tokenizer=bare, prefix_token_id=3).prefix_token_id == 3


def test_an_encoder_is_refused(lm_class, tokenizer, tmp_path):
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=257, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    BertForMaskedLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="later tokens"):
        lm_class(str(tmp_path))
