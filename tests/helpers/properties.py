"""Properties that any attention must have, as functions that assert, and the models they are asserted on."""

import copy
from itertools import pairwise

import pytest
import torch

from helpers import tiny_models
from helpers.cases import CASES
from helpers.oracle import as_oracle
from hf_linattn import from_pretrained, patch_model, unpatch_model
from hf_linattn.registry import names_in, parse

FAMILIES = {
    "llama": {"cls": "LlamaForCausalLM"},
    "mqa, odd head_dim": {"cls": "LlamaForCausalLM", "num_key_value_heads": 1, "head_dim": 6},
    "gpt2": {"cls": "GPT2LMHeadModel", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "qwen3": {"cls": "Qwen3ForCausalLM"},
    "gpt_neox": {"cls": "GPTNeoXForCausalLM"},
    "gemma3": {
        "cls": "Gemma3ForCausalLM",
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "granite": {"cls": "GraniteForCausalLM"},
    "stablelm": {"cls": "StableLmForCausalLM"},
    "olmo2": {"cls": "Olmo2ForCausalLM"},
    "bert": {"cls": "BertForMaskedLM"},
    "electra": {"cls": "ElectraForMaskedLM", "embedding_size": 32},
}
ADAPTED = {
    "bloom": {"cls": "BloomForCausalLM"},
    "falcon": {"cls": "FalconForCausalLM", "alibi": False},
    "falcon, alibi": {"cls": "FalconForCausalLM", "alibi": True, "multi_query": False},
    "falcon, grouped": {"cls": "FalconForCausalLM", "new_decoder_architecture": True, "num_kv_heads": 2},
    "gptj": {"cls": "GPTJForCausalLM", "rotary_dim": 4, "n_positions": 256},
    "codegen": {"cls": "CodeGenForCausalLM", "rotary_dim": 4, "n_positions": 256, "n_ctx": 256},
    "mpt": {"cls": "MptForCausalLM", "max_seq_len": 256},
    "gpt_neo": {
        "cls": "GPTNeoForCausalLM",
        "num_heads": 4,
        "window_size": 16,
        "attention_types": [[["global", "local"], 1]],
    },
    "gpt_neox_japanese": {"cls": "GPTNeoXJapaneseForCausalLM"},
}
"""Families with attention code of their own, which adapters route; see `tests/patching/test_adapters.py`."""
SHAPED = {
    **{family: {"num_key_value_heads": None, "head_dim": None} for family in ADAPTED},
    "gpt2": {},
    "gpt_neox": {"num_key_value_heads": None, "head_dim": None},
    "stablelm": {"head_dim": None},
    "bert": {"head_dim": None},
    "electra": {"head_dim": None},
}
ENCODERS = ("bert", "electra")


def serves(family, case):
    """Whether the patch attends in the direction of the family."""
    parts = parse(CASES[case].spec, CASES[case].options).parts
    other = "causal" if family in ENCODERS else "bidirectional"
    fits = all(part.directions != other for part in parts)
    fits = fits and not (family in ENCODERS and CASES[case].options.get("salient"))
    ropeless = family in ("gpt2", *ENCODERS)
    switched = CASES[case].options.get("rope") is False or "nope" in names_in(CASES[case].spec)
    # the oracle stills a model's rotary embedding as a whole, and these keep some layers as they are
    in_part = family == "gemma3" and any(part.linear for part in parts)
    return fits and not (switched and (ropeless or in_part))


VARIANTS = ("llama", "gemma3", "bert")
"""Families for cases with other options than the first of their patch: "window, sinks"."""
PAIRS = [
    (family, case)
    for family in FAMILIES
    for case in CASES
    if serves(family, case) and (family in VARIANTS or ", " not in case)
]
CAUSAL = [(family, case) for family, case in PAIRS if family not in ENCODERS]
WHOLE = "llama"
"""The family with all cases in every run; others have those that it has not, and `REPRESENTATIVES`."""
REPRESENTATIVES = ("elu1", "softmax1+logn", "window+elu1", "alibi")
FIRST = [case for case in CASES if ", " not in case]
OTHER_OPTIONS = [case for case in CASES if ", " in case]
SHARES = {"bert": FIRST, "mqa, odd head_dim": FIRST[::3], "gemma3": FIRST[1::3]}
"""What families that differ most from it have besides; all else is run by `-m full`."""


def marked(pairs, shares=SHARES, half=None):
    """The pairs as pytest parameters; those that only `-m full` runs are marked. See `always`."""
    return [
        pytest.param(family, case, marks=() if always(family, case, shares, half) else pytest.mark.full)
        for family, case in pairs
    ]


def always(family, case, shares=SHARES, half=None):
    """Whether every run has the pair.

    `shares` as `SHARES`; with `half` 0 or 1 every second of the cases with other options is left out.
    """
    if half is not None and case in OTHER_OPTIONS[half::2]:
        return False
    alone = family == WHOLE or (family in VARIANTS and not serves(WHOLE, case))
    return alone or case in REPRESENTATIVES or case in shares.get(family, ())


def is_shared(family, case):
    """Whether every run has the pair beside the same case of the family that has all."""
    return family != WHOLE and always(family, case) and serves(WHOLE, case)


CUTS = (0, 7, 71, 72, 100)


def model_of(family, dtype=torch.float64):
    known = {**FAMILIES, **ADAPTED}
    config = {k: v for k, v in known[family].items() if k != "cls"}
    sizes = (
        {} if family == "gpt2" else {**tiny_models.SIZES, "num_hidden_layers": 2, **SHAPED.get(family, {})}
    )
    sizes = {
        k: v for k, v in {"vocab_size": 97, "eos_token_id": None, **sizes, **config}.items() if v is not None
    }
    return tiny_models.build(known[family]["cls"], dtype=dtype, **sizes)


def learned(model):
    """Parameters and buffers of the patch: module -> name -> tensor."""
    return {
        m: {k: x.clone() for k, x in m.linattn.state_dict().items()}
        for m in model.modules()
        if "linattn" in m._modules
    }


def patch(model, case):
    """Patched, and parameters that would be learned moved away from where they start."""
    patch_model(model, CASES[case].spec, options=CASES[case].options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.linattn.parameters() if "linattn" in module._modules else ():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.2 * noise.to(parameter.dtype))
    return model


def is_kept(module):
    """Layers that keep their window under a patch that cannot honour it."""
    if hasattr(module, "attention_type"):
        return module.attention_type == "local"
    types = getattr(module.config, "layer_types", None) or []
    return bool(types) and types[module.layer_idx] == "sliding_attention"


def oracle_of(model, case):
    """The oracle of a case on an unpatched model, with the weights that `patch` gives it."""
    spec, options = CASES[case].spec, CASES[case].options
    extra = {} if parse(spec, options).windowed else {"where": lambda module: not is_kept(module)}
    weights = learned(patch(model, case))
    unpatch_model(model)
    flat = {}
    for key, value in options.items():
        flat.update(value if key in names_in(spec) and isinstance(value, dict) else {key: value})
    return as_oracle(model, spec, learned=weights, **extra, **flat)


def logits(model, ids, mask=None, **kwargs):
    positions = {}
    if mask is not None and model.config.model_type not in ENCODERS:
        positions = {"position_ids": tiny_models.positions(mask)}
    cache = {} if model.config.model_type in ENCODERS else {"use_cache": False}
    return model(ids, attention_mask=mask, **positions, **cache, **kwargs).logits


def close(got, want, tolerance):
    difference = float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1))
    assert difference <= tolerance, f"{difference:.2e} > {tolerance:.0e}"  # NaN fails


# Families that compute their norms in float32 even in float64 models differ from the oracle by float32
# rounding.
TOLERANCE = 1e-6


@torch.no_grad()
def check_forward(family, case, lengths=None):
    """By default all lengths around a chunk; one of each kind where another family has all in every run."""
    model = model_of(family)
    lengths = lengths or ((1, 65, 130) if is_shared(family, case) else (1, 2, 63, 64, 65, 130))
    batches = [tiny_models.left_padded(tiny_models.tokens(2, length), length // 4) for length in lengths]
    wants = []
    for ids, mask in batches:
        with oracle_of(model, case) as seen:
            wants.append(logits(model, ids, mask))
        assert seen.calls
    patch(model, case)
    for (ids, mask), want in zip(batches, wants, strict=True):
        close(logits(model, ids, mask)[mask.bool()], want[mask.bool()], TOLERANCE)


def gradients(model, ids, mask, weights):
    """Of every weight of the model by name, and the patch's; `weights` as `learned` gives."""
    model.zero_grad()
    out = logits(model, ids, mask).log_softmax(-1)
    (out * out.detach().sin() * mask[..., None]).sum().backward()
    names = {module: name for name, module in model.named_modules()}
    own = {f"{names[m]}.linattn.{key}": x for m, tensors in weights.items() for key, x in tensors.items()}
    every = {**dict(model.named_parameters()), **own}
    return {name: x.grad.clone() for name, x in every.items() if x.grad is not None}


def check_gradient(family, case):
    model = model_of(family)
    ids, mask = tiny_models.left_padded(tiny_models.tokens(2, 70), 20)
    with oracle_of(model, case) as run:
        for tensors in run.learned.values():
            for x in tensors.values():
                x.requires_grad_(x.is_floating_point())
        want = gradients(model, ids, mask, run.learned)
    patch(model, case)
    got = gradients(model, ids, mask, {})
    assert got.keys() <= want.keys()  # a formula may use a buffer
    assert {name for name, _ in model.named_parameters()} & want.keys() == got.keys()
    top = max(float(x.norm()) for x in want.values())
    for name, found in got.items():
        difference = float((found - want[name]).norm()) / max(float(want[name].norm()), 1e-6 * top)
        assert difference < 1e-5, f"{name}: {difference:.1e}"


@torch.no_grad()
def check_padding(family, case, side="left"):
    model = patch(model_of(family), case)
    row = tiny_models.tokens(1, 60)
    alone = logits(model, row, torch.ones_like(row))
    ids = tiny_models.tokens(2, 75, 1)
    part = {
        "left": torch.arange(15, 75),
        "right": torch.arange(60),
        "middle": torch.cat([torch.arange(3, 10), torch.arange(13, 40), torch.arange(46, 72)]),
    }[side]
    ids[0, part] = row[0]
    mask = torch.ones_like(ids)
    mask[0] = 0
    mask[0, part] = 1
    extra = {"position_ids": tiny_models.positions(mask)} if family in ENCODERS else {}
    close(logits(model, ids, mask, **extra)[:1, part], alone, TOLERANCE)


@torch.no_grad()
def check_packing(family, case):
    model = patch(model_of(family), case)
    lengths = (30, 1, 25, 44)
    ids = tiny_models.tokens(2, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None].expand(2, -1)
    got = model(ids, position_ids=positions, use_cache=False).logits
    want = torch.cat([logits(model, part) for part in ids.split(lengths, 1)], 1)
    close(got, want, TOLERANCE)


@torch.no_grad()
def check_no_leak(family, case):
    model = patch(model_of(family), case)
    ids = tiny_models.tokens(2, 90)
    changed = ids.clone()
    changed[:, 70:] = (changed[:, 70:] + 13) % 90 + 3
    before, after = logits(model, ids), logits(model, changed)
    close(after[:, :70], before[:, :70], 1e-12)
    assert float((after[:, 70:] - before[:, 70:]).abs().max()) > 1e-3


@torch.no_grad()
def check_rows(family, case):
    model = patch(model_of(family), case)
    ids, mask = tiny_models.left_padded(tiny_models.tokens(3, 70), 20)
    together = logits(model, ids, mask)
    other = ids.clone()
    other[1] = tiny_models.tokens(1, 70, 9)[0]
    close(logits(model, other, mask)[[0, 2]], together[[0, 2]], 1e-12)


@torch.no_grad()
def check_decode(family, case, cuts=None):
    """By default token by token over the end of a chunk and all windows, or over some of it, as above."""
    some = (*range(41, 46), *range(62, 67))
    cuts = cuts or (0, 40, *(some if is_shared(family, case) else range(41, 71)), 100)
    model = patch(model_of(family), case)
    ids, mask = tiny_models.left_padded(tiny_models.tokens(2, 100), 5)
    positions = tiny_models.positions(mask)
    want = logits(model, ids, mask)
    cache, parts = None, []
    for first, last in pairwise(cuts):
        out = model(
            ids[:, first:last],
            attention_mask=mask[:, :last],
            position_ids=positions[:, first:last],
            past_key_values=cache,
            use_cache=True,
        )
        cache = out.past_key_values
        parts.append(out.logits)
    close(torch.cat(parts, 1)[mask.bool()], want[mask.bool()], TOLERANCE)


@torch.no_grad()
def check_half_precision(family, case, dtype=torch.bfloat16, bound=None):
    """Error against float64 on the same rounded weights: at most the bound, and not above twice the unpatched
    model's."""
    half = model_of(family, torch.float32).to(dtype)
    exact = copy.deepcopy(half).double()
    ids = tiny_models.tokens(2, 130)

    def error():
        want = logits(exact, ids)
        return float((logits(half, ids).double() - want).norm() / want.norm())

    unpatched = error()
    patch(half, case)
    patch(exact, case)
    patched = error()
    assert patched <= max(bound or CASES[case].half, 2 * unpatched), (
        f"{patched:.3f}, unpatched {unpatched:.3f}"
    )


@torch.no_grad()
def check_unpatch(family, case):
    model = model_of(family)
    ids = tiny_models.tokens(2, 20)
    before, keys, config, own = (
        logits(model, ids),
        list(model.state_dict()),
        model.config.to_dict(),
        model.config,
    )
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    patch(model, case)
    logits(model, ids)
    unpatch_model(model)
    assert torch.equal(logits(model, ids), before)
    assert list(model.state_dict()) == keys
    assert model.config.to_dict() == config
    assert model.config is own
    assert [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()] == hooks


@torch.no_grad()
def check_save(family, case, folder):
    model = patch(model_of(family, torch.float32), case)
    ids = tiny_models.tokens(2, 40)
    want = logits(model, ids)
    model.save_pretrained(folder)
    assert torch.equal(logits(from_pretrained(str(folder), dtype=torch.float32), ids), want)
