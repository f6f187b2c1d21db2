"""Sinks at positions inside the cache: which layers turn queries, and how they are turned back."""

import pytest
import torch
from helpers import tiny_models
from helpers.family_checks import HYBRID, in_chunks
from helpers.family_models import causal_model, token_batch
from helpers.multimodal import multimodal
from helpers.oracle import as_oracle
from transformers import AttentionInterface

from hf_linattn import describe, patch_model
from hf_linattn.errors import OptionError
from hf_linattn.patches.window.rotary import rotary_of
from hf_linattn.patching.discovery import find_sites

TURNED = [
    "llama",
    "gpt_neox",  # some of the features
    "gemma3_text",  # embeddings by type of layer
    "modernbert-decoder",
    "olmo3",
    "gemma3n_text",  # a function of one tensor
    "gemma4_text",
    "deepseek_v3",  # the last features, as latent attention has them
    "glm4_moe_lite",
    "nanochat",  # a norm without weights behind the turn
    "falcon",  # an adapter
    "gpt_neox_japanese",
    "beam",  # one layer with and one without
]
STEPS = 60


def queries_of(model, start):
    """Attention module -> its queries, for the same tokens from a position on."""
    found, batch = {}, token_batch()
    places = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"]) + start

    def note(module, query, key, value, *args, **kwargs):
        found[module] = query
        return compute(module, query, key, value, *args, **kwargs)

    with torch.no_grad(), as_oracle(model, "softmax"):
        compute = AttentionInterface()["oracle_softmax"]
        AttentionInterface.register("oracle_softmax", note)
        model(input_ids=batch["input_ids"], position_ids=places, use_cache=False)
    return found


@pytest.mark.parametrize("name", TURNED)
def test_queries_are_turned_to_where_they_would_be_earlier(name):
    model = causal_model(name)
    late, early = queries_of(model, 100 + STEPS), queries_of(model, 100)
    turned = 0
    for site in find_sites(model):
        rotary = rotary_of(site, "auto")
        if rotary is None:
            continue
        got = rotary.back(late[site.module], torch.full((1, 1), STEPS))
        assert tiny_models.distance(got, early[site.module]) < 1e-4  # some embeddings compute in float32
        assert tiny_models.distance(late[site.module], early[site.module]) > 0.1
        turned += 1
    assert turned == {"beam": 1, "gemma3n_text": 4}.get(name, 2)


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}),
        ("Cohere2ForCausalLM", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("Exaone4ForCausalLM", {"layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_layers_without_positions_have_none_to_turn(cls, config):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 97, "head_dim": 8, "sliding_window": 16}
    model = tiny_models.build(cls, **sizes, pad_token_id=0, eos_token_id=None, **config)
    options, ids = {"size": 20, "sinks": 3}, tiny_models.tokens(1, 90)
    plan = {"1": ("window", {**options, "positions": "text"})}
    want = patch_model(model, plan)(ids).logits
    assert tiny_models.distance(patch_model(model, {"1": ("window", options)})(ids).logits, want) < 1e-12
    with pytest.raises(OptionError, match=r"layers\.1\.self_attn: .* none could be read"):
        patch_model(model, {"1": ("window", {**options, "positions": "cache"})})


def test_a_norm_with_weights_behind_the_turn_keeps_the_positions_of_the_text():
    model = causal_model("hunyuan_v1_dense")
    assert find_sites(model)[0].rotated_by is None
    options, ids = {"size": 20, "sinks": 3}, tiny_models.tokens(1, 60)
    want = patch_model(model, "window", options={**options, "positions": "text"})(ids).logits
    assert torch.equal(patch_model(model, "window", options=options)(ids).logits, want)


def test_the_embedding_of_the_tower_around_it_is_a_layers_own():
    """A tower for pictures has one too."""
    model = causal_model("gemma4")
    inside = [site for site in find_sites(model) if "language_model" in site.name]
    assert inside
    assert all(site.rotary is model.model.language_model.rotary_emb for site in inside)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["gemma3_text", "deepseek_v3", "olmo3", "nanochat"])
def test_tokens_one_by_one_equal_the_whole(name, dtype):
    """In float32 by one call in C++ for each, where there is a library; a turn for each type of layer."""
    model, ids = causal_model(name).to(dtype), token_batch()["input_ids"]
    patch_model(model, HYBRID, options={"size": 12, "sinks": 3}, sliding="global")
    assert all(site.module.linattn.window.rotary for site in find_sites(model))
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        got = in_chunks(model, inputs, (0, *range(20, 41)))
    assert tiny_models.distance(got, whole[:, :40]) < (1e-4 if dtype == torch.float32 else 1e-6)


@pytest.mark.parametrize("name", ["Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"])
def test_sinks_stay_where_images_share_positions(name):
    """An image of 1,000 tokens moves the text behind it by some 30 positions, not by 1,000."""
    model, _ = multimodal(name)
    for site in find_sites(model):
        if not site.tower:
            assert rotary_of(site, "auto") is None
            with pytest.raises(OptionError, match="has places in images too"):
                rotary_of(site, "cache")
    text = [site for site in find_sites(causal_model("qwen3_5_text")) if site.rotary is not None]
    assert text
    assert all(rotary_of(site, "auto") for site in text)  # the same embedding, no images


def test_describe_says_where_sinks_stay():
    said = "sinks at the text's positions"
    for name, stay in (("llama", []), ("hunyuan_v1_dense", [said] * 2)):
        model = patch_model(causal_model(name), "window", options={"size": 8, "sinks": 2})
        notes = [row.note for row in describe(model)]
        assert [note for note in notes if note] == stay, name
        assert (said in str(describe(model))) is bool(stay)


def test_sinks_are_turned_beside_images_that_count_as_tokens():
    model, _ = multimodal("LlavaForConditionalGeneration")
    assert all(rotary_of(site, "auto") for site in find_sites(model) if not site.tower)


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize(("size", "sinks"), [(8, 2), (3, 7)], ids=["", "more sinks than window"])
def test_layers_share_angles_in_each_form(monkeypatch, padded, size, sinks):
    """By torch's operations the embedding is asked once a forward, not once a layer; masks still count."""
    monkeypatch.setenv("HF_LINATTN_CPP", "0")
    model = tiny_models.llama(layers=3).eval()
    patch_model(model, "window+elu1", options={"size": size, "sinks": sinks})
    asked = []
    model.model.rotary_emb.register_forward_hook(lambda *_: asked.append(1))
    ids = torch.randint(0, model.config.vocab_size, (2, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0 if padded else 1
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        cache, got = None, []
        for start, stop in ((0, 6), (6, 20), (20, 21), (21, 22), (22, 30)):
            asked.clear()
            seen = {"attention_mask": mask[:, :stop], "past_key_values": cache}
            out = model(input_ids=ids[:, start:stop], **seen, use_cache=True)
            cache = out.past_key_values
            got.append(out.logits)
            assert len(asked) <= 2
    found = torch.cat(got, 1)[mask.bool()]
    assert tiny_models.distance(found, whole[mask.bool()]) < 1e-5


def test_a_model_is_trained_after_inference_mode(compiled):
    sinks = {"size": 4, "sinks": 2}
    model = patch_model(tiny_models.llama(dtype=torch.float32), "window+elu1", options=sinks)
    ids = tiny_models.tokens(2, 30)
    with torch.inference_mode():
        want = model(ids, use_cache=False).logits.clone()
    got = model(ids, use_cache=False).logits
    got.sum().backward()
    assert torch.equal(got, want)


def test_a_model_made_in_inference_mode_reads_and_writes_as_any_other(compiled):
    def tokens_of():
        model = patch_model(tiny_models.llama(dtype=torch.float32), "window", options={"size": 4, "sinks": 2})
        return model.generate(tiny_models.tokens(2, 30), max_new_tokens=8, do_sample=False)

    want = tokens_of()
    with torch.inference_mode():
        assert torch.equal(tokens_of(), want)
