"""Prompt and prefix tuning of peft: virtual tokens before the text, in the embeddings or in the cache."""

import pytest
import torch
import transformers
from helpers.oracle import as_oracle
from helpers.tiny_models import distance, grow, left_padded, llama, positions, tokens

import hf_linattn
from hf_linattn.errors import CacheError
from hf_linattn.patching.cache_layers import CACHE_NAME

peft = pytest.importorskip("peft", reason="peft is not installed")
# peft asks transformers for an attribute that transformers 5.23 has renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
VIRTUAL = 6
PEFTS_NAME = "past_key_values"  # in `prepare_inputs_for_generation`
PATCHES = ["elu1", "softmax1", "logn", "softmax1+logn"]


def tuned(kind, model):
    config = {"prefix": peft.PrefixTuningConfig, "prompt": peft.PromptTuningConfig}[kind]
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model, config(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL)).double()
    with torch.no_grad():
        for parameter in wrapped.prompt_encoder.parameters():
            parameter.normal_(0, 0.7)
    return wrapped


def run(wrapped, ids, mask):
    """Logits of the text, and the gradient of the virtual tokens."""
    wrapped.zero_grad()
    out = wrapped(ids, attention_mask=mask, labels=ids)
    out.loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in wrapped.prompt_encoder.parameters()])
    return out.logits.detach()[:, -ids.shape[1] :], gradient


@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("kind", ["prefix", "prompt"])
def test_virtual_tokens_count_as_in_the_oracle(kind, patch):
    model = llama()
    wrapped = tuned(kind, model).train()
    ids, mask = left_padded(tokens(2, 50), 9)
    with as_oracle(model, patch) as seen:
        want, want_gradient = run(wrapped, ids, mask)
    assert seen.calls
    hf_linattn.patch_model(model, patch)
    got, gradient = run(wrapped, ids, mask)
    assert distance(got[mask.bool()], want[mask.bool()]) < 1e-9
    assert float((gradient - want_gradient).norm()) < 1e-6 * float(want_gradient.norm())
    with torch.no_grad(), wrapped.disable_adapter():
        without = wrapped(ids, attention_mask=mask).logits
    assert distance(without[mask.bool()], got[mask.bool()]) > 1e-3


# generate() makes position_ids for every model, and peft's prompt tuning says that it drops them
@pytest.mark.filterwarnings(
    "ignore:Position ids are not supported for parameter efficient tuning:UserWarning"
)
@pytest.mark.filterwarnings("ignore:Both `past_key_values` and `cache` are set:FutureWarning")
@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("kind", ["prefix", "prompt"])
def test_generate_from_virtual_tokens(kind, patch):
    """Against full forwards of the wrapped model, which carry the virtual tokens each time."""
    model = llama()
    wrapped = tuned(kind, model).eval()
    if CACHE_NAME != PEFTS_NAME and not torch.equal(*generated(wrapped)):
        pytest.skip(
            f"{kind} tuning generates wrongly unpatched: peft {peft.__version__} looks for the cache as "
            f"{PEFTS_NAME!r}, transformers {transformers.__version__} calls it {CACHE_NAME!r}, and so the "
            "virtual tokens are put in again with every token"
        )
    hf_linattn.patch_model(model, patch)
    assert torch.equal(*generated(wrapped))


def generated(wrapped):
    """What generate() writes, and what full forwards do."""
    ids = tokens(2, 20)
    want = ids
    with torch.no_grad():
        for _ in range(10):
            logits = wrapped(want, attention_mask=torch.ones_like(want)).logits
            want = torch.cat([want, logits[:, -1].argmax(-1, keepdim=True)], 1)
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
    return wrapped.generate(max_new_tokens=10, **kwargs), want


def test_prompt_embeddings_are_ordinary_tokens_before_the_text():
    model = llama()
    wrapped = tuned("prompt", model).eval()
    hf_linattn.patch_model(model, "elu1")
    ids, mask = tokens(1, 30), torch.ones(1, 30, dtype=torch.long)
    with torch.no_grad():
        virtual = wrapped.prompt_encoder["default"].embedding.weight[None]
        text = model.get_input_embeddings()(ids)
        want = model(inputs_embeds=torch.cat([virtual, text], 1), use_cache=False).logits
        assert distance(wrapped(ids, attention_mask=mask).logits, want) < 1e-9


def test_lora_generates_what_full_forwards_give():
    model = hf_linattn.patch_model(llama(), "elu1")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config).double().eval()
    ids, mask = left_padded(tokens(2, 20), 4)
    assert positions(mask)[0, -1] == 15
    got = wrapped.generate(input_ids=ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
    assert torch.equal(got, grow(wrapped, ids, 10, mask))


@pytest.mark.parametrize("patch", ["elu1", "window+gated"])
def test_an_attention_that_peft_has_wrapped_generates(patch):
    """Adaption prompts stand around the attention of a layer, where `generate` looks for it by name."""
    model = hf_linattn.patch_model(llama(), patch)
    config = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=1)
    wrapped = peft.get_peft_model(model, config).double().eval()
    ids, mask = left_padded(tokens(2, 20), 4)
    got = wrapped.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert torch.equal(got, grow(wrapped, ids, 6, mask))


@pytest.mark.parametrize(
    ("patch", "way_out"), [("h2o", "tune a prompt in place of a prefix"), ("delta", "'source': 'value'")]
)
def test_a_prefix_without_what_the_state_needs_is_refused(patch, way_out):
    wrapped = tuned("prefix", hf_linattn.patch_model(llama(), patch))
    with pytest.raises(CacheError, match=way_out):
        wrapped(tokens(1, 9))
