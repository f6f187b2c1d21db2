"""Continuous batching of patched models: every request gets the tokens that it gets alone."""

import copy
import sys
import threading

import pytest
import torch
from helpers.tiny_models import SIZES, build, llama, tokens
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_linattn import is_patched, patch_model, unpatch_model
from hf_linattn.errors import NotPatchedError, UnsupportedCallError, UnsupportedModelError
from hf_linattn.patching.discovery import find_sites

pytest.importorskip(
    "hf_linattn.patching.batching",
    reason="continuous batching of patched models needs transformers 5.20",
    exc_type=ImportError,
)

from hf_linattn.patching.batching import STATES, StateAllocator
from hf_linattn.patching.paged import CACHE

NEW = 10
LENGTHS = [(7 * i) % 53 + 1 for i in range(32)]
PROMPTS = [tokens(1, length, seed=i)[0].tolist() for i, length in enumerate(LENGTHS)]
OUTPUTS = [3 + i % (NEW - 2) for i in range(32)]
LAYERS = ["sliding_attention", "full_attention"]
HEADS = {"num_key_value_heads": 4}


def gemma3():
    return build(
        "Gemma3ForCausalLM", num_hidden_layers=2, **SIZES, sliding_window=16, layer_types=LAYERS, seed=2
    )


def qwen3():
    return build("Qwen3ForCausalLM", num_hidden_layers=2, **SIZES)


def gpt2():
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 256, "vocab_size": 97}
    return build("GPT2LMHeadModel", **sizes, bos_token_id=1, eos_token_id=None)


def gpt_neox():
    """Its layers take the cache under a name of their own, and do not tell it the step."""
    return build("GPTNeoXForCausalLM", num_hidden_layers=2, **SIZES | HEADS)


def opt():
    """The model asks its cache how long it is."""
    return build("OPTForCausalLM", num_hidden_layers=2, **SIZES | HEADS, word_embed_proj_dim=32, ffn_dim=64)


def alone(model, prompt, new=NEW):
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None)
    return out[0, len(prompt) :].tolist()


def serving(model, new=NEW, **settings):
    """A running manager with small pages, so that prompts are cut and requests wait for each other."""
    settings = {"page_size": 8, "num_blocks": 48, "max_batch_tokens": 96, **settings}
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=ContinuousBatchingConfig(**settings)
    )


def results(manager, names):
    found = {}
    while len(found) < len(names):
        assert manager.is_running()
        if (result := manager.get_result(timeout=1)) is not None:
            assert result.error is None
            found[result.request_id] = result.generated_tokens
    return [found[name] for name in names]


def served(model, requests):
    with serving(model) as manager:
        return results(manager, [manager.add_request(ids, max_new_tokens=new) for ids, new in requests])


@pytest.mark.parametrize(
    ("family", "spec", "options", "sliding", "count"),
    [
        pytest.param(llama, "softmax1+logn", {}, "keep", 8, marks=pytest.mark.full),
        pytest.param(llama, "strided", {"stride": 4}, "keep", 8, marks=pytest.mark.full),
        pytest.param(llama, "elu1+logn", {}, "keep", 8, marks=pytest.mark.full),
        (llama, "window+gated", {"size": 8, "sinks": 2}, "keep", 32),
        (llama, "window+elu1", {"size": 8, "sinks": 2, "salient": 5}, "keep", 32),
        pytest.param(
            llama, {"0": "window", "1": "alibi+topk"}, {"size": 8, "k": 5}, "keep", 8, marks=pytest.mark.full
        ),
        pytest.param(qwen3, "flow", {}, "keep", 8, marks=pytest.mark.full),
        (gpt2, {"0": "elu1"}, {}, "keep", 8),
        pytest.param(gemma3, "logn", {}, "keep", 8, marks=pytest.mark.full),
        pytest.param(gemma3, "local", {"size": 8}, "global", 8, marks=pytest.mark.full),
        (gemma3, "elu1", {}, "keep", 32),
        (llama, "delta", {}, "keep", 8),
        (gpt_neox, {"0": "elu1", "1": "softmax1"}, {}, "keep", 8),
        (opt, "window+gated", {"size": 8}, "keep", 8),
        (gemma3, "softmax1+fox", {"source": "value", "half_life": 4.0}, "keep", 8),
        pytest.param(
            qwen3,
            "window+delta+output_gate",
            {"window": {"size": 8, "mix": "learned"}},
            "keep",
            8,
            marks=pytest.mark.full,
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_requests_of_mixed_lengths_get_their_tokens(family, spec, options, sliding, count):
    model = patch_model(family(), spec, options=options, sliding=sliding)
    requests = list(zip(PROMPTS[:count], OUTPUTS, strict=False))
    want = [alone(model, *request) for request in requests]
    assert served(model, requests) == want
    assert alone(model, PROMPTS[0], OUTPUTS[0]) == want[0]


def test_float32_through_the_call_of_transformers_and_unpatched_again():
    model = llama(dtype=torch.float32)
    before = [alone(model, prompt) for prompt in PROMPTS[:6]]
    patch_model(model, "hedgehog")
    want = [alone(model, prompt) for prompt in PROMPTS[:6]]
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    for each in (model, copy.deepcopy(model)):
        found = each.generate_batch(PROMPTS[:6], generation_config=config)
        assert [out.generated_tokens for out in found.values()] == want
    assert model.config._attn_implementation == "linattn"
    unpatch_model(model)
    assert "init_continuous_batching" not in model.__dict__
    assert [alone(model, prompt) for prompt in PROMPTS[:6]] == before


def test_slots_are_taken_again_and_memory_is_flat():
    model = patch_model(llama(), "elu1")
    with serving(model, num_blocks=None, max_requests_per_batch=4) as manager:
        sizes = set()
        for _ in range(3):
            names = [manager.add_request(prompt, max_new_tokens=3) for prompt in PROMPTS]
            results(manager, names)
            cache = manager.batch_processor.cache
            slots = cache.cache_allocators[STATES]
            sizes.add((cache.cache_tensor.nbytes, slots.num_blocks))
            assert not slots.block_table
            assert len(slots.ledger.slots) <= slots.num_blocks
        assert len(sizes) == 1
        total, count = sizes.pop()
        # S and z in float64, 2 layers of 2 heads; two sectors of a paged cache are never given out
        assert slots.state_bytes == 2 * 2 * 8 * 9 * 8
        assert 4 <= count < len(PROMPTS)
        assert total == (count + 2) * slots.state_bytes


def test_a_slot_beside_pages_is_hardly_larger_than_its_states():
    model = patch_model(llama(layers=5), {"0": "elu1", "1": "window+gated", "2-4": "softmax1"})
    with serving(model) as manager:
        results(manager, [manager.add_request(PROMPTS[1])])
        cache = manager.batch_processor.cache
        slots = cache.cache_allocators[STATES]
        assert isinstance(slots, StateAllocator)
        assert slots.state_bytes <= slots.bytes_per_block < 1.5 * slots.state_bytes
        assert cache.bytes_per_sector < 4 * slots.bytes_per_block
        cache.pool.try_to_free_sectors()
        assert cache.compute_free_capacity() == 1


def test_the_next_turn_goes_on_from_the_state():
    model = patch_model(llama(), "window+elu1", options={"size": 8})
    with serving(model) as manager:
        text, steps = list(PROMPTS[5]), []
        for _ in range(3):
            answer = results(manager, [manager.add_request(text)])[0]
            assert answer == alone(model, text)
            processor = manager.batch_processor
            steps.append(max(map(len, processor.cache.cache_allocators[STATES].ledger.slots)))
            assert steps[-1] == len(text) + NEW - 1  # the last token was not read yet
            text = text + answer + PROMPTS[2][:4]
        matched = processor.cache.search_prefix_match("next", text)
        assert matched == steps[-1]
        assert processor.cache.search_prefix_match("again", text) == 0  # a state belongs to one request
    with serving(model, allow_block_sharing=False) as manager:
        results(manager, [manager.add_request(text)])
        assert not manager.batch_processor.cache.cache_allocators[STATES].ledger.slots


@pytest.mark.parametrize("spec", ["gated", {"0": "elu1", "1": "softmax1"}], ids=str)
def test_forks_and_scarce_memory(spec):
    model = patch_model(llama(), spec)
    want = [alone(model, prompt) for prompt in PROMPTS[:8]]
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config.num_return_sequences = 3
    settings = ContinuousBatchingConfig(page_size=8, num_blocks=16, max_batch_tokens=64)
    found = model.generate_batch(PROMPTS[:8], generation_config=config, continuous_batching_config=settings)
    assert [out.generated_tokens for out in found.values()] == [one for one in want for _ in range(3)]


def test_a_cancelled_request_frees_its_slot_and_a_stopped_server_leaves_the_model_patched():
    model = patch_model(llama(), {"0": "elu1", "1": "softmax1"})
    with serving(model, new=100) as manager:
        long = [manager.add_request(PROMPTS[i], streaming=True) for i in range(4)]
        assert manager.get_result(timeout=60) is not None  # in the middle
        manager.cancel_request(long[0])
        other = manager.add_request(PROMPTS[7], max_new_tokens=4)
        while (result := manager.get_result(timeout=60)).request_id != other:
            assert result.error is None
        assert result.generated_tokens == alone(model, PROMPTS[7], 4)
        slots = manager.batch_processor.cache.cache_allocators[STATES]
        assert long[0] not in slots.block_table
        manager.stop(hard_stop=True)
    assert is_patched(model)
    assert alone(model, PROMPTS[7], 4) == result.generated_tokens
    assert not manager.is_running()


def test_a_failed_step_ends_the_requests_with_its_reason_and_keeps_no_state(caplog):
    model = patch_model(llama(), "elu1")
    with serving(model) as manager:
        results(manager, [manager.add_request(PROMPTS[3])])
        slots = manager.batch_processor.cache.cache_allocators[STATES]
        assert len(slots.ledger.slots) == 1
        broken = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        manager.add_request(PROMPTS[4])
        assert "division" in manager.get_result(timeout=60).error
        broken.remove()
        assert len(slots.ledger.slots) == 1
        assert not slots.block_table
    assert alone(model, PROMPTS[3])


def test_the_thread_ends_with_the_program(monkeypatch):
    model = patch_model(llama(), "elu1")
    with serving(model, new=200) as manager:
        manager.add_request(PROMPTS[3], streaming=True)
        assert manager.get_result(timeout=60).error is None
        monkeypatch.setattr(threading, "main_thread", threading.Thread)  # one that does not run
        manager._generation_thread.join(timeout=60)
        assert not manager.is_running()
        monkeypatch.undo()


def test_what_cannot_be_served_is_refused_before_anything_is_changed():
    model = patch_model(llama(), "elu1")
    with pytest.raises(UnsupportedCallError, match="leave use_async_batching off"):
        model.init_continuous_batching(
            continuous_batching_config=ContinuousBatchingConfig(use_async_batching=True)
        )
    chunked = patch_model(
        build(
            "Llama4ForCausalLM",
            dtype=torch.float32,
            num_hidden_layers=2,
            **SIZES,
            attention_chunk_size=16,
            num_local_experts=2,
            intermediate_size_mlp=64,
        ),
        "softmax1",
    )
    with pytest.raises(UnsupportedModelError, match=r"chunked window .*: use generate"):
        chunked.generate_batch([[3, 4]])
    assert is_patched(chunked)


def test_a_transformers_whose_cache_takes_no_other_kinds_of_layers_is_refused(monkeypatch):
    """As that of 5.18, which has every name that is looked for."""

    def closed(config):
        raise ValueError("Invalid layer type")

    paged = sys.modules["transformers.generation.continuous_batching.cache"]
    monkeypatch.setattr(paged, "ATTN_TYPE_TO_ALLOCATOR", dict(paged.ATTN_TYPE_TO_ALLOCATOR))
    monkeypatch.setattr(paged, "group_layers_by_attn_type", closed)
    monkeypatch.delitem(sys.modules, "hf_linattn.patching.batching")
    model = patch_model(llama(), "softmax1")
    with pytest.raises(UnsupportedCallError, match=r"transformers 5\.20: its paged cache takes no layers"):
        model.generate_batch([[3, 4]])


def test_a_cache_of_someone_else_and_a_manager_of_another_patch_are_refused():
    model = patch_model(llama(), "softmax1")
    with pytest.raises(UnsupportedCallError, match=r"use model\.generate_batch"):
        model(tokens(1, 4), write_index=[torch.arange(4)], use_cache=False)
    manager = model.init_continuous_batching()
    model._cached_continuous_batching_manager = manager
    assert model.init_continuous_batching() is manager
    patch_model(model, "elu1")
    for each in (model, unpatch_model(model)):
        with pytest.raises(NotPatchedError, match="destroy_cached"):
            each.init_continuous_batching()
    model.destroy_cached_continuous_batching_manager()


def test_a_state_that_grows_is_refused(caplog):
    model = patch_model(llama(), "elu1")
    with serving(model) as manager:
        results(manager, [manager.add_request(PROMPTS[3])])
        child = model.model.layers[1].self_attn.linattn.attention
        causal = child.causal

        def growing(tokens, state):
            output, after = causal(tokens, state)
            return output, after._replace(z=torch.cat([after.z, after.z], -1))

        child.causal = growing
        manager.add_request(PROMPTS[4])
        error = manager.get_result(timeout=60).error
        assert error.startswith("layer 1: a state of (2, 16) does not fit into its slot, (2, 8)")


def test_unpatching_in_the_middle_is_no_silent_change(caplog):
    model = patch_model(llama(), "softmax1")
    with serving(model, new=60) as manager:
        manager.add_request(PROMPTS[3], streaming=True)
        assert manager.get_result(timeout=60).error is None
        with manager.pause():
            unpatch_model(model)
        while (result := manager.get_result(timeout=60)).error is None:
            pass
        assert "unpatched while" in result.error


def test_a_layer_that_runs_twice_is_refused(caplog):
    """As dory's do: the second pass would overwrite what the first one keeps."""
    model = patch_model(llama(), "elu1")
    with serving(model) as manager:
        results(manager, [manager.add_request(PROMPTS[3])])
        model.model.layers[1] = model.model.layers[0]
        manager.add_request(PROMPTS[4])
        assert "LlamaAttention 0 runs more than once" in manager.get_result(timeout=60).error


def test_a_model_that_keeps_the_cache_to_itself_is_refused(caplog, monkeypatch):
    model = patch_model(llama(), "softmax1")
    attention = model.model.layers[1].self_attn
    attention.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, CACHE: None}), with_kwargs=True
    )
    with serving(model) as manager:
        manager.add_request(PROMPTS[3])
        assert "LlamaAttention 1 was handed no paged cache" in manager.get_result(timeout=60).error
    assert len(find_sites(model)) == 2
