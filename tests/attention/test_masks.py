"""Masks of the caller: packed documents, 4D masks, other directions. Honoured exactly, or refused."""

import pytest
import torch
from helpers.oracle import as_oracle
from helpers.tiny_models import SIZES, build, distance, left_padded, llama, positions, tokens
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask

import hf_linattn
from hf_linattn.attention.documents import DocumentRows
from hf_linattn.attention.masks import is_compact
from hf_linattn.errors import LinattnError, UnsupportedCallError, UnsupportedMaskError

EXACT = 1e-9
LENGTHS = (30, 25, 35)
PATCHES = ["elu1", "softmax1", "logn", "softmax1+logn"]
every_patch = pytest.mark.parametrize("patch", PATCHES)
TRIANGLE = torch.ones(90, 90, dtype=torch.bool).tril()


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def ids():
    return tokens(2, 90)


def full(model, ids, **kwargs):
    return model(ids, use_cache=False, **kwargs).logits


def against_oracle(patch, ids, **kwargs):
    """Logits of the patched model and of the oracle on the same batch."""
    model = llama()
    with as_oracle(model, patch) as seen:
        want = full(model, ids, **kwargs)
    assert seen.calls
    return full(hf_linattn.patch_model(model, patch), ids, **kwargs), want


def packed():
    at = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    borders = torch.tensor([0, 30, 55, 90], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 35, "max_length_k": 35}
    return at, lengths


@every_patch
def test_packed_documents_equal_one_by_one(patch, ids):
    model = hf_linattn.patch_model(llama(), patch)
    alone = torch.cat([full(model, document) for document in ids.split(LENGTHS, 1)], 1)
    at, borders = packed()
    assert distance(full(model, ids, position_ids=at.expand(2, -1)), alone) < EXACT
    assert distance(full(model, ids[:1], position_ids=at, **borders), alone[:1]) < EXACT
    same = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
    blocks = TRIANGLE & (same[:, None] == same[None])
    mask = blocks[None, None].expand(2, 1, -1, -1)
    assert distance(full(model, ids, position_ids=at.expand(2, -1), attention_mask=mask), alone) < EXACT
    assert distance(full(model, ids), alone) > 1e-3, "documents that see each other would not be noticed"


def test_documents_of_like_lengths_are_computed_together(ids, monkeypatch):
    model = hf_linattn.patch_model(llama(layers=2), "window", options={"size": 8, "sinks": 2})
    attention, shapes = model.model.layers[0].self_attn.linattn.attention, []
    plain = attention.causal

    def causal(tokens, state):
        shapes.append(tuple(tokens.key.shape[::2]))
        return plain(tokens, state)

    lengths = (7, 1, 6, 30, 8, 24, 14)  # ids are two rows of 90 tokens
    at = torch.cat([torch.arange(n) for n in lengths])[None].expand(2, -1)
    alone = torch.cat([full(model, document) for document in ids.split(lengths, 1)], 1)
    waits = []
    of = DocumentRows.of
    monkeypatch.setattr(DocumentRows, "of", lambda labels: waits.append(1) or of(labels))
    monkeypatch.setattr(attention, "causal", causal)
    assert distance(full(model, ids, position_ids=at), alone) < EXACT
    assert shapes == [(2, 1), (2, 6), (4, 8), (2, 14), (2, 24), (2, 30)], "rows and tokens of each call"
    assert len(waits) == 1, "both layers share what they know of the documents"


def test_packed_documents_with_a_cache_are_refused(ids):
    model = hf_linattn.patch_model(llama(), "elu1")
    at, borders = packed()
    with pytest.raises(UnsupportedCallError, match="use_cache=False"):
        model(ids[:1], position_ids=at, past_key_values=DynamicCache(), **borders)
    with pytest.raises(UnsupportedCallError, match="cu_seq_lens_q"):
        full(model, ids, position_ids=at.expand(2, -1), **borders)
    same = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
    mask = (TRIANGLE & (same[:, None] == same[None]))[None, None]
    with pytest.raises(UnsupportedCallError, match="use_cache=False"):
        model(ids[:1], position_ids=at, attention_mask=mask, past_key_values=DynamicCache())


def padded_triangle(padding):
    mask = TRIANGLE[None, None].repeat(2, 1, 1, 1)
    mask[0, :, :, :padding] = False
    return mask


@every_patch
@pytest.mark.parametrize("hidden", [None, torch.finfo(torch.float64).min, -10000.0])
def test_causal_4d_mask_is_recognised(patch, hidden, ids):
    mask = padded_triangle(13)
    if hidden is not None:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, hidden)
    _, flat = left_padded(ids, 13)
    model = hf_linattn.patch_model(llama(), patch)
    at = positions(flat)
    want = full(model, ids, attention_mask=flat, position_ids=at)
    got = full(model, ids, attention_mask=mask, position_ids=at)
    assert distance(got[flat.bool()], want[flat.bool()]) < EXACT


@pytest.mark.parametrize("patch", ["gated", "decay", "delta", "window+gated", "fox"])
@pytest.mark.parametrize("padding", [0, 5])
def test_what_looks_back_alone_is_refused_where_the_mask_alone_says_what_a_module_is(patch, padding):
    model = build("LayoutLMForMaskedLM", num_hidden_layers=1, **SIZES)
    ids, mask = left_padded(tokens(2, 20), padding)
    want = model(ids, attention_mask=mask).logits
    hf_linattn.patch_model(model, patch)
    with pytest.raises(UnsupportedMaskError, match=r"layer\.0\.attention\.self .*the keys behind it"):
        model(ids, attention_mask=mask)
    assert torch.equal(hf_linattn.unpatch_model(model)(ids, attention_mask=mask).logits, want)


FOREIGN = {
    "window": TRIANGLE & ~TRIANGLE.tril(-16),
    "prefix": TRIANGLE | (torch.arange(90) < 10),
    "island": TRIANGLE | ((torch.arange(90) // 10 == 3)[:, None] & (torch.arange(90) // 10 == 3)),
    "strided": TRIANGLE & ((torch.arange(90)[:, None] - torch.arange(90)) % 3 == 0),
    "anti-causal": TRIANGLE.T,
}


@every_patch
@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_4d_mask_is_refused_or_exact(patch, name, ids):
    mask = FOREIGN[name][None, None]
    if patch == "elu1":
        with pytest.raises(
            UnsupportedMaskError, match=r"^model\.layers\.0\.self_attn .*: the .*neither causal nor"
        ):
            full(hf_linattn.patch_model(llama(), patch), ids, attention_mask=mask)
        return
    got, want = against_oracle(patch, ids, attention_mask=mask)
    assert distance(got, want) < EXACT


@every_patch
def test_bias_and_masks_per_head_are_refused_or_exact(patch, ids):
    noise = torch.randn(1, 1, 90, 90, generator=torch.Generator().manual_seed(0)).double()
    bias = noise.masked_fill(~TRIANGLE, torch.finfo(torch.float64).min)
    heads = TRIANGLE[None, None].repeat(2, 4, 1, 1)
    heads[:, 1, 40:, 20] = False
    for mask, reason in ((bias, "adds values"), (heads, "differs between heads")):
        if patch == "elu1":
            with pytest.raises(UnsupportedMaskError, match=rf"layers\.0\.self_attn .*{reason}"):
                full(hf_linattn.patch_model(llama(), patch), ids, attention_mask=mask)
        else:
            got, want = against_oracle(patch, ids, attention_mask=mask)
            assert distance(got, want) < EXACT


PARTS = {
    "islands": {"block_sequence_ids": torch.where((torch.arange(90) // 10 == 2), 0, -1)[None].expand(2, -1)},
    "or": {"or_mask_function": lambda b, h, q, k: k < 7},
    "and": {"and_mask_function": lambda b, h, q, k: k > q - 9},
}


@every_patch
@pytest.mark.parametrize("name", PARTS)
def test_masks_that_transformers_makes_from_parts(patch, name, ids):
    model = llama()
    with as_oracle(model, patch):
        want = full(model, ids, attention_mask=_made(model, name))
    hf_linattn.patch_model(model, patch)
    mask = _made(model, name)
    if patch == "elu1":
        with pytest.raises(UnsupportedMaskError):
            full(model, ids, attention_mask=mask)
    else:
        assert distance(full(model, ids, attention_mask=mask), want) < EXACT


@every_patch
def test_blocks_of_a_prompt_without_an_image_mean_nothing(patch, ids):
    model = hf_linattn.patch_model(llama(), patch)
    none = torch.full((2, 90), -1)
    mask = create_causal_mask(model.config, torch.zeros(2, 90, 8), None, None, block_sequence_ids=none)
    assert is_compact(mask)
    assert torch.equal(full(model, ids, attention_mask=mask), full(model, ids))


def _made(model, name):
    return create_causal_mask(model.config, torch.zeros(2, 90, 8), None, None, **PARTS[name])


def test_4d_window_in_a_cached_step_is_refused(ids):
    model, cache = hf_linattn.patch_model(llama(), "elu1"), DynamicCache()
    model(ids[:, :40], past_key_values=cache)
    window = FOREIGN["window"][40:41, :41].expand(2, 1, 1, 41)
    with pytest.raises(UnsupportedMaskError, match="other past tokens"):
        model(ids[:, 40:41], past_key_values=cache, attention_mask=window)


@every_patch
def test_4d_causal_mask_in_cached_steps(patch, ids):
    model, cache = hf_linattn.patch_model(llama(), patch), DynamicCache()
    want = full(model, ids)
    for start, end in ((0, 40), (40, 41), (41, 70), (70, 90)):
        mask = TRIANGLE[start:end, :end].expand(2, 1, -1, -1)
        got = model(ids[:, start:end], past_key_values=cache, attention_mask=mask).logits
        assert distance(got, want[:, start:end]) < EXACT


@every_patch
def test_bidirectional_decoder(patch, ids):
    _, mask = left_padded(ids, 13)
    model = llama()
    model.config.is_causal = False
    with as_oracle(model, patch):
        want = full(model, ids, attention_mask=mask)
    hf_linattn.patch_model(model, patch)
    got = full(model, ids, attention_mask=mask)
    assert distance(got[mask.bool()], want[mask.bool()]) < EXACT
    model.config.is_causal = True
    assert distance(full(model, ids, attention_mask=mask), got) > 1e-3
    if patch == "elu1":
        model.config.is_causal = False
        with pytest.raises(
            UnsupportedCallError, match=r"self_attn .*bidirectional attention with a growing cache"
        ):
            model(ids, past_key_values=DynamicCache())


@every_patch
def test_attention_weights_are_returned_or_refused(patch, ids):
    model = hf_linattn.patch_model(llama(), patch)
    if patch == "elu1":
        with pytest.raises(UnsupportedCallError, match="no attention weights"):
            model(ids, output_attentions=True)
        return
    out = model(ids, output_attentions=True, use_cache=False)
    assert distance(out.logits, full(model, ids)) < EXACT
    for weights in out.attentions:
        assert weights.shape == (2, 4, 90, 90)
        assert not weights[..., ~TRIANGLE].any()
        total = weights.sum(-1)
        if patch == "logn":
            assert distance(total, torch.ones_like(total)) < EXACT
        else:
            assert bool((total < 1).all())
            assert bool((total > 0).all())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "llama, by its config"])
def test_each_layer_has_its_own_attention_weights(family, implementation, ids):
    """Of a layer that keeps its softmax too: without weights of its own it would get the next layer's."""
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 97, "attn_pdrop": 0.0}
        model = build("GPT2LMHeadModel", implementation="eager", bos_token_id=1, eos_token_id=1, **sizes)
    else:
        model = llama(3, implementation="eager")
    given = {"output_attentions": True, "use_cache": False}
    want = model(ids, **given).attentions
    if family.endswith("config"):
        model.config.output_attentions = given.pop("output_attentions")
    model.config._attn_implementation_internal = implementation
    hf_linattn.patch_model(model, {"1": "softmax1"})
    found = model(ids, **given).attentions
    assert len(found) == 3
    assert distance(found[0], want[0]) < EXACT
    assert bool((found[1].sum(-1) < 1).all())
    assert distance(found[2].sum(-1), want[2].sum(-1)) < 1e-6  # eager softmax is in float32
    with hf_linattn.bypassed(model):
        assert all(distance(*pair) < EXACT for pair in zip(model(ids, **given).attentions, want, strict=True))
    hf_linattn.patch_model(model, "elu1")
    with pytest.raises(UnsupportedCallError, match="no attention weights"):
        model(ids, **given)


def test_a_padded_mask_that_hides_everything_stays_finite(ids):
    mask = torch.ones_like(ids)
    mask[0] = 0
    for patch in PATCHES:
        model = hf_linattn.patch_model(llama(), patch)
        out = full(model, ids, attention_mask=mask)
        assert bool(torch.isfinite(out).all())
        assert distance(out[1:], full(model, ids[1:])) < EXACT


def test_every_refusal_is_of_the_one_family():
    assert issubclass(UnsupportedMaskError, LinattnError)
    assert issubclass(UnsupportedCallError, LinattnError)


@pytest.mark.parametrize("patch", ["pooled", "linformer", "elu1", "scaled"])
def test_encoders_whose_modules_do_not_say_so_see_both_ways(patch):
    model = hf_linattn.patch_model(build("SplinterModel", num_hidden_layers=2, **SIZES), patch)
    ids = tokens(1, 23)
    other = ids.clone()
    other[0, -1] = 1
    mask = torch.ones_like(ids)
    with torch.no_grad():
        outputs = [model(x, attention_mask=mask).last_hidden_state for x in (ids, other)]
    assert (outputs[0] != outputs[1]).any(-1).all()


@pytest.mark.parametrize("patch", ["relu2", "relu_n", "sigmoid_n", "logn", "softmax1", "elu1"])
def test_padding_of_a_model_that_hides_it_by_minus_10000_does_not_count(patch):
    model = build("MarkupLMModel", num_hidden_layers=2, **{**SIZES, "pad_token_id": 0})
    hf_linattn.patch_model(model, patch)
    ids = tokens(1, 15)
    padded = torch.cat([ids, torch.zeros(1, 8, dtype=torch.long)], 1)
    with torch.no_grad():
        alone = model(input_ids=ids).last_hidden_state
        beside = model(
            input_ids=padded, attention_mask=(torch.arange(23) < 15)[None].long()
        ).last_hidden_state
    assert distance(beside[:, :15], alone) < EXACT
