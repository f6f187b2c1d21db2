"""A tiny model with its tokenizer, a text, and results as the commands leave them."""

import json

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SENTENCE = "The cat sat on the mat, and the dog ran after the cat; who was faster? "


def save_model(folder, context=64):
    """Two layers, width 16, one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*alphabet, "<s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>", clean_up_tokenization_spaces=False
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=256,
        eos_token_id=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def perplexity_results(source, values, patch=None, stride=256, **arguments):
    """results.json of the perplexity command; values: length -> perplexity."""
    rows = [
        {
            "model": "it",
            "length": length,
            "perplexity": value,
            "byte_perplexity": value**0.5,
            "stderr": value / 10,
            "byte_stderr": 0.1,
            "tokens": 2048,
            "bytes": 4096,
            "nats": 1.0,
            "windows": 8,
            "documents": 8,
            "stderr_over": "documents",
            "buckets": [],
        }
        for length, value in values.items()
    ]
    return {
        "format": "hf_linattn.perplexity/1",
        "complete": True,
        "command": f"python -m hf_linattn.eval.perplexity --model {source}",
        "arguments": {"model": str(source), "patch": patch, "stride": stride, "data": "held", **arguments},
        "versions": {"python": "3.11", "torch": "2.13.0"},
        "data": {"documents": 8, "tokens": 100000, "bytes": 300000},
        "train_length": 512,
        "models": [{"label": "it", "source": str(source)}],
        "rows": rows,
    }


def finetune_results(folder, patch, before, after):
    """results.json of the fine-tuning command."""
    return {
        "command": f"python -m hf_linattn.finetune --output-dir {folder}",
        "arguments": {"output_dir": str(folder), "patch": patch},
        "versions": {"torch": "2.13.0"},
        "parameters": 1_400_000,
        "seed": 0,
        "tokens": 204800,
        "seconds": 61.2,
        "eval_loss_before": before,
        "eval_loss": after,
    }


TRAIN_CSV = """step,tokens,loss,lr,grad_norm,tokens_per_second,eval_loss
0,0,,,,,5.0
1,4096,4.9,0.001,1,4000,
2,8192,4.1,0.001,1,4000,4.0
"""


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
