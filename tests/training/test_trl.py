"""TRL on patched models: by name and in memory, packed rows, LoRA, references, rewards of generated text."""

import copy

import pytest
import torch
from helpers.fixtures_finetune import make_workplace
from helpers.kinds import DECODERS, KINDS
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    get_linear_schedule_with_warmup,
)

from hf_linattn import describe, is_patched, patch_model
from hf_linattn.errors import UnsupportedModelError

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, which differ from version to version
STEPS = 10
SENTENCES = ["the cat sat on the mat", "a dog ran to the log and back", "it rained", "nobody came home today"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    make_workplace(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.bos_token
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attention_dropout=0.0)
    patch_model(model, "elu1").save_pretrained(folder / "patched")
    tokenizer.save_pretrained(folder / "patched")
    return folder


@pytest.fixture
def model(place):
    return AutoModelForCausalLM.from_pretrained(place / "patched")


@pytest.fixture
def tokenizer(place):
    return AutoTokenizer.from_pretrained(place / "patched")


def texts():
    from datasets import Dataset

    return Dataset.from_list([{"text": f"{SENTENCES[i % 4]} {i}"} for i in range(24)])


def pairs():
    from datasets import Dataset

    rows = [{"prompt": f"say {i}:", "chosen": f" yes, {i}", "rejected": f" no, {i}"} for i in range(24)]
    return Dataset.from_list(rows)


def settings(cls, folder, **options):
    return cls(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, logging_steps=1,
        use_cpu=True, bf16=False, report_to=[], save_strategy="no", learning_rate=1e-2,
        disable_tqdm=True, seed=0, **options,
    )  # fmt: skip


def losses(trainer):
    trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(found) == STEPS
    assert is_patched(trainer.model)
    return found


def sft(model, tokenizer, folder, **options):
    lora = options.pop("peft_config", None)
    args = settings(trl.SFTConfig, folder, **options)
    return trl.SFTTrainer(
        model=model, args=args, train_dataset=texts(), processing_class=tokenizer, peft_config=lora
    )


def test_sft_is_a_plain_loop(place, model, tokenizer, tmp_path):
    trainer = sft(copy.deepcopy(model), tokenizer, tmp_path, max_length=48)
    same = sft(copy.deepcopy(model), tokenizer, tmp_path, max_length=48)
    batches = list(same.get_train_dataloader())[:STEPS]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, STEPS)
    want = []
    model.train()
    for batch in batches:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        want.append(loss.item())
    assert losses(trainer) == pytest.approx(want, rel=1e-3)
    assert want[-1] < want[0]


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 48, "packing": True},
        {"max_length": None, "padding_free": True},
    ],
    ids=["packing", "padding_free"],
)
def test_sft_by_the_name_of_the_folder_and_with_joined_rows(place, tokenizer, tmp_path, options):
    patched = str(place / "patched")
    args = settings(trl.SFTConfig, tmp_path, model_init_kwargs={"dtype": "float32"}, **options)
    trainer = trl.SFTTrainer(model=patched, args=args, train_dataset=texts(), processing_class=tokenizer)
    assert {row.patch for row in describe(trainer.model)} == {"elu1"}
    batch = next(iter(trainer.get_train_dataloader()))
    found = losses(trainer)
    assert found[-1] < found[0]
    rows = batch["position_ids"][0].eq(0).nonzero().flatten().tolist()
    assert len(rows) > 1, "several texts lie in one row"
    fresh = AutoModelForCausalLM.from_pretrained(patched)
    with torch.no_grad():
        joined = fresh(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
        for start, stop in zip(rows, [*rows[1:], joined.shape[0]], strict=True):
            alone = fresh(batch["input_ids"][:, start:stop], use_cache=False).logits[0]
            assert torch.allclose(joined[start:stop], alone, atol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in DECODERS if kind != "linear"])
def test_sft_of_other_patches_without_padding(place, tokenizer, tmp_path, kind):
    patch, options = KINDS[kind]
    model = AutoModelForCausalLM.from_pretrained(place / "model", attention_dropout=0.0)
    patch_model(model, patch, options=options)
    found = losses(sft(model, tokenizer, tmp_path, max_length=None, padding_free=True))
    assert found[-1] < found[0]


def test_sft_with_lora_trains_the_adapter_alone(model, tokenizer, tmp_path):
    from peft import LoraConfig

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    trainer = sft(model, tokenizer, tmp_path, max_length=48, peft_config=lora)
    assert all("lora" in name for name, p in trainer.model.named_parameters() if p.requires_grad)
    losses(trainer)
    after = trainer.model.unload().state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def dpo(model, tokenizer, folder, **options):
    args = settings(trl.DPOConfig, folder, max_length=48)
    return trl.DPOTrainer(
        model=model, args=args, train_dataset=pairs(), processing_class=tokenizer, **options
    )


@pytest.mark.parametrize("given", ["folder", "model of the folder", "model and its copy"])
def test_dpo_has_a_patched_reference(place, model, tokenizer, tmp_path, given):
    reference = {"ref_model": copy.deepcopy(model)} if given == "model and its copy" else {}
    trainer = dpo(str(place / "patched") if given == "folder" else model, tokenizer, tmp_path, **reference)
    assert is_patched(trainer.ref_model)
    found = losses(trainer)
    assert found[0] == pytest.approx(0.6931, abs=1e-3), "model and reference agree at the start"
    assert found[-1] < found[0]


def test_dpo_on_a_model_that_was_never_saved_patched_says_what_to_do(place, tokenizer, tmp_path):
    model = patch_model(AutoModelForCausalLM.from_pretrained(place / "model", attention_dropout=0.0), "elu1")
    with pytest.raises(UnsupportedModelError, match=r"ref_model=copy\.deepcopy"):
        dpo(model, tokenizer, tmp_path)


@pytest.fixture(params=DECODERS)
def folder_of_kind(request, place, tokenizer, tmp_path):
    """A patched model on the disk, with its tokenizer."""
    patch, options = KINDS[request.param]
    model = AutoModelForCausalLM.from_pretrained(place / "model", attention_dropout=0.0)
    patch_model(model, patch, options=options).save_pretrained(tmp_path / "patched")
    tokenizer.save_pretrained(tmp_path / "patched")
    return str(tmp_path / "patched")


def test_preferences_and_rewards_of_every_kind(folder_of_kind, tokenizer, tmp_path):
    trainer = dpo(folder_of_kind, tokenizer, tmp_path)
    assert is_patched(trainer.ref_model)
    found = losses(trainer)
    assert found[0] == pytest.approx(0.6931, abs=1e-3)
    assert found[-1] < found[0]

    model = AutoModelForSequenceClassification.from_pretrained(folder_of_kind, num_labels=1)
    model.config.pad_token_id = tokenizer.pad_token_id
    args = settings(trl.RewardConfig, tmp_path, max_length=48)
    found = losses(
        trl.RewardTrainer(model=model, args=args, train_dataset=pairs(), processing_class=tokenizer)
    )
    assert found[-1] < found[0]


def test_grpo_generates_and_learns(folder_of_kind, tokenizer, tmp_path):
    from datasets import Dataset

    texts = []

    def reward(completions, **_):
        texts.extend(completions)
        return [float(sum(map(ord, text)) % 7) for text in completions]

    args = settings(
        trl.GRPOConfig, tmp_path, num_generations=2, max_completion_length=6, beta=0.1, num_iterations=2
    )
    prompts = Dataset.from_list([{"prompt": "say " * (i % 5 + 1) + f"{i}:"} for i in range(24)])
    trainer = trl.GRPOTrainer(
        model=folder_of_kind,
        reward_funcs=reward,
        args=args,
        train_dataset=prompts,
        processing_class=tokenizer,
    )
    assert is_patched(trainer.ref_model)
    losses(trainer)
    assert len(texts) == STEPS  # two each, and each group is learned from twice
    divergences = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert divergences[0] == pytest.approx(0, abs=1e-6), "generated by what the reference is"
    assert divergences[-1] > 0
