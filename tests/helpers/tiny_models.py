"""Tiny random models whose attention matters, and greedy decoding without any cache."""

import copy

import torch
import transformers

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "pad_token_id": None,  # an assistant takes generated padding for padding
    "bos_token_id": 1,
    "eos_token_id": None,
}
ENCODER_DECODER_SIZES = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 2,
}


def build(cls, seed=1, dtype=torch.float64, implementation="sdpa", **config):
    """A model of this class; weights of std 0.2, since the usual 0.02 would hide errors in attention."""
    key = repr((cls, seed, implementation, sorted(config.items()), torch.get_default_device()))
    # making one takes ten times as long as copying it, and thousands of tests want the same few
    model, generator = _made.pop(key, None) or _fresh(
        getattr(transformers, cls), seed, implementation, config
    )
    _made[key] = model, generator
    if len(_made) > 32:
        del _made[next(iter(_made))]
    torch.set_rng_state(generator)
    return copy.deepcopy(model).to(dtype)  # the same weights in every dtype


_made = {}


def _fresh(cls, seed, implementation, config):
    torch.manual_seed(seed)
    if implementation == "sdpa" and not cls._supports_sdpa:
        implementation = "eager"
    model = cls(cls.config_class(**copy.deepcopy(config), attn_implementation=implementation)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    return model, torch.get_rng_state()


def llama(layers=2, **options):
    return build("LlamaForCausalLM", num_hidden_layers=layers, **{**SIZES, **options})


def tokens(rows, length, seed=0):
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(ids, padding):
    """Ids and mask, row 0 beginning with this many padded tokens."""
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return ids.masked_fill(mask == 0, 0), mask


def positions(mask):
    return (mask.cumsum(1) - 1).clamp_min(0)


@torch.no_grad()
def grow(model, ids, steps, mask=None):
    """Greedy continuation by the argmax of full forwards."""
    mask = torch.ones_like(ids) if mask is None else mask
    for _ in range(steps):
        out = model(ids, attention_mask=mask, position_ids=positions(mask), use_cache=False)
        ids = torch.cat([ids, out.logits[:, -1].argmax(-1, keepdim=True)], 1)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    return ids


def distance(a, b):
    return float((a.detach().double() - b.detach().double()).abs().max())
