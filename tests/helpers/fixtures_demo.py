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


def comparison(folder):
    """An original, a control and two patches, with samples."""
    curves = {
        "unpatched": (None, {512: 16.0, 1024: 115.0, 8192: 202.0}),
        "control": (None, {512: 15.0, 1024: 110.0, 8192: 200.0}),
        "elu1": ("elu1", {512: 45.0, 1024: 45.5, 8192: 46.0}),
        "softmax1": ("softmax1", {512: 15.1, 1024: 109.0, 8192: 201.0}),
    }
    for name, (patch, values) in curves.items():
        source = "base" if name == "unpatched" else folder / "runs" / name
        write(folder / "perplexity" / name / "results.json", perplexity_results(source, values))
        if name != "unpatched":
            write(
                folder / "runs" / name / "results.json",
                finetune_results(folder / "runs" / name, patch, 5.0, 4.0),
            )
            write(folder / "runs" / name / "train.csv", TRAIN_CSV)
    sources = ["base", *(str(folder / "runs" / name) for name in curves if name != "unpatched")]
    linear = str(folder / "runs" / "elu1")
    states = [
        {"model": s, "state_bytes": 16896 * (s == linear), "bytes_per_token": 1024 * (s != linear)}
        for s in sources
    ]
    samples = [
        {"model": s, "prompt": 0, "text": f"</pre><script>alert('{index}')"}
        for index, s in enumerate(sources)
    ]
    write(
        folder / "samples.json", {"models": states, "prompts": ["x" * 1000 + " <b>end"], "samples": samples}
    )
    return folder
