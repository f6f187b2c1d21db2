"""A workplace for tests of masked words: a small BERT, its tokenizer, texts."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    PreTrainedTokenizerFast,
)

from helpers.fixtures_finetune import make_workplace
from hf_linattn.training.masked_lm import Masking

SPECIAL = {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}


PAD, CLS, SEP, MASK = range(256, 260)


def bert_config(**options):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"vocab_size": 260, "max_position_embeddings": 64, "pad_token_id": PAD}
    return BertConfig(**sizes | options)


def save_tokenizer(folder, **left_out):
    """One token per byte; [CLS] text [SEP] as BERT's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*alphabet, *SPECIAL.values()])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ends = [("[CLS]", CLS), ("[SEP]", SEP)]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    names = {f"{kind}_token": token for kind, token in SPECIAL.items() if kind not in left_out}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Tiny BERTs, with a masked-LM head and without, beside the Llama and the texts of the other tests."""
    folder = tmp_path_factory.mktemp("masked")
    make_workplace(folder)
    torch.manual_seed(0)
    BertForMaskedLM(bert_config()).save_pretrained(folder / "bert")
    BertModel(bert_config()).save_pretrained(folder / "bare")
    for name in ("bert", "bare"):
        save_tokenizer(folder / name)
    save_tokenizer(folder / "maskless", mask=True)
    return folder


@pytest.fixture
def masking(workplace):
    return Masking.of(AutoTokenizer.from_pretrained("bert"), block_size=34, seed=3)
