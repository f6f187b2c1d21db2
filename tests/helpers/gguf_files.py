"""Models as GGUF files, written by the package gguf."""

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
FILE = "tiny.gguf"
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(weight, heads):
    """Rows of queries and keys in llama.cpp's order of rotary pairs."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(model, path, kind):
    """The model as a GGUF file, matrices in F32 or Q8_0."""
    config, quantised = model.config, getattr(gguf.GGMLQuantizationType, kind)
    out = gguf.GGUFWriter(str(path), "llama")
    out.add_vocab_size(config.vocab_size)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_key_length(config.head_dim)
    out.add_value_length(config.head_dim)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(10000.0)
    for name, tensor in model.state_dict().items():
        x, place = tensor.numpy(), name.removesuffix(".weight")
        if place.startswith("model.layers."):
            _, _, layer, place = place.split(".", 3)
            heads = {"self_attn.q_proj": config.num_attention_heads}
            heads["self_attn.k_proj"] = config.num_key_value_heads
            x = interleaved(x, heads[place]) if place in heads else x
            place = f"blk.{layer}.{NAMES[place]}"
        else:
            place = NAMES[place]
        if x.ndim == 2:
            packed = gguf.quants.quantize(np.ascontiguousarray(x), quantised)
            out.add_tensor(f"{place}.weight", packed, raw_dtype=quantised)
        else:
            out.add_tensor(f"{place}.weight", x)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
