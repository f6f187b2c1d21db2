"""Attention that no adapter serves, and why."""

FLASH = "load the model with attn_implementation='eager'"
REASONS = {
    **dict.fromkeys(("FalconFlashAttention2", "GPTJFlashAttention2", "GPTNeoFlashAttention2"), FLASH),
    "LongformerSelfAttention": "a band of keys, beside global tokens with projections of their own",
    "LEDEncoderSelfAttention": "a band of keys, beside global tokens with projections of their own",
    "BigBirdBlockSparseAttention": "blocks of keys, some at random; attention_type='original_full' is served",
    "LSHSelfAttention": "keys chosen by hashing, queries and keys in one; see the patch 'lsh'",
    "LocalSelfAttention": "chunks of keys, in a cache of its own",
    "ProphetNetNgramSelfAttention": "one stream of queries for each of the next tokens",
    "FunnelRelMultiheadAttention": "text that is pooled between layers",
    "NystromformerSelfAttention": "softmax approximated by landmarks",
    "DisentangledSelfAttention": "scores of content and place, gathered from tables of relative places",
}
"""Name of the class -> what stands between it and the attention interface."""
