"""sentence-transformers on a folder with a patched encoder: embeddings, saving, a short training run."""

import pytest
import torch
from helpers.fixtures_masked_lm import bert_config, save_tokenizer
from transformers import AttentionInterface, AutoTokenizer, BertModel, PreTrainedModel

from hf_linattn import describe, is_patched, patch_model
from hf_linattn.errors import UnsupportedCallError
from hf_linattn.patching.interface import NAME

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, which differ from version to version
sentence_transformers = pytest.importorskip("sentence_transformers")
SENTENCES = ["the cat sat on the mat", "a dog ran to the log and back", "it rained", "nobody came home today"]


@pytest.fixture(scope="module", params=["elu1", "hedgehog"])
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = patch_model(BertModel(bert_config(initializer_range=0.2)).eval(), request.param)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder, model


def load(folder, **options):
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu", **options)


def pooled(model, folder):
    """The mean of the last states over the tokens of a sentence."""
    batch = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    kept = batch["attention_mask"][..., None]
    return (states * kept).sum(1) / kept.sum(1)


def test_embeddings_and_saving_again(saved, tmp_path):
    folder, model = saved
    loaded = load(folder)
    got = torch.tensor(loaded.encode(SENTENCES))
    assert torch.allclose(got, pooled(model, folder), atol=1e-6)
    loaded.save(str(tmp_path))
    again = load(tmp_path)
    assert torch.equal(torch.tensor(again.encode(SENTENCES)), got)
    inside = again[0].model
    assert str(describe(inside)) == str(describe(model))


def train(model, folder):
    from datasets import Dataset
    from sentence_transformers import losses

    rows = [
        {"sentence1": SENTENCES[i], "sentence2": SENTENCES[j], "score": float(i == j)}
        for i in range(4)
        for j in range(4)
    ]
    args = sentence_transformers.SentenceTransformerTrainingArguments(
        str(folder), max_steps=8, per_device_train_batch_size=16, logging_steps=1, use_cpu=True, seed=0,
        report_to=[], save_strategy="no", learning_rate=1e-2, disable_tqdm=True,
    )  # fmt: skip
    trainer = sentence_transformers.SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        loss=losses.CosineSimilarityLoss(model),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_its_trainer(saved, tmp_path):
    folder, _ = saved
    with pytest.raises(UnsupportedCallError, match=r"attention_probs_dropout_prob"):
        train(load(folder), tmp_path)
    model = load(folder, config_kwargs={"attention_probs_dropout_prob": 0.0})
    begun = {name: p.detach().clone() for name, p in model.named_parameters() if ".linattn." in name}
    losses = train(model, tmp_path)
    assert losses[-1] < losses[0]
    assert all(not torch.equal(p, begun[name]) for name, p in model.named_parameters() if name in begun)
    want = model.encode(SENTENCES)
    model.save_pretrained(str(tmp_path / "tuned"))
    assert is_patched(model[0].model)
    assert (load(tmp_path / "tuned").encode(SENTENCES) == want).all()


@pytest.mark.parametrize("given", [{}, {"attn_implementation": "sdpa"}], ids=str)
def test_without_the_package_it_stops(saved, given, monkeypatch):
    loading = PreTrainedModel.from_pretrained.__func__.__wrapped__  # transformers' own
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(loading))
    monkeypatch.delitem(AttentionInterface._global_mapping, NAME)
    with pytest.raises((ValueError, OSError), match="linattn"):
        load(saved[0], model_kwargs=given)
