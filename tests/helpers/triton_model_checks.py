"""Patched models through the Triton kernels, run in Triton's interpreter beside the CPU's own forms.

Plain functions, called in a process of their own as those of `triton_checks`.
"""

import pytest
import torch

from hf_linattn import patch_model
from hf_linattn.attention import linear
from hf_linattn.ops import dispatch, gate, softmax_map, window_attention, window_rest_operator

from . import tiny_models
from .triton_checks import assert_near


def check_a_model(spec, dtype, tolerance, packed=False, options=None):
    """Logits, gradients and a decoded token of a patched model through Triton, beside the CPU's own forms."""
    runs = []
    for triton in (True, False):
        model = patch_model(tiny_models.llama(1), spec, options=options).to(getattr(torch, dtype))
        torch.manual_seed(0)
        ids = torch.randint(0, model.config.vocab_size, (2, 25))
        mask, positions = torch.ones_like(ids), None
        if packed:
            mask, positions = None, torch.cat([torch.arange(11), torch.arange(13)]).expand(2, -1)
        else:
            mask[0, :9] = 0
        forms, windows, gates, joins, maps = [], [], [], [], []

        def choose(query, key, value, kind, state=None, form=None, features=None, forms=forms):
            forms.append(form)
            return "triton"

        def take(*about, windows=windows):
            windows.append(about)
            return True

        def take_gates(value, gates=gates):
            gates.append(value)
            return True

        def take_maps(x, weight, maps=maps):
            maps.append(x)
            return True

        def joined(*given, joins=joins, attend=window_rest_operator.attention):
            joins.append(given)
            return attend(*given)

        with pytest.MonkeyPatch.context() as patch:
            if triton:
                patch.setattr(linear, "choose_backend", choose)
                patch.setattr(dispatch, "choose_backend", choose)
                patch.setattr(window_attention, "kernels_take", take)
                patch.setattr(window_attention, "kernels_take_token", take)
                patch.setattr(gate, "kernels_take", take_gates)
                patch.setattr(softmax_map, "kernels_take", take_maps)
                patch.setattr(window_rest_operator, "attention", joined)
            given = {"attention_mask": None if mask is None else mask[:, :24], "position_ids": positions}
            logits = model(ids[:, :24], **given, use_cache=False).logits
            seen = slice(9, None)
            logits[:, seen].float().square().mean().backward()
            results = [logits[:, seen], *(x.grad for x in model.parameters() if x.grad is not None)]
            if not packed:
                with torch.no_grad():
                    cache = model(ids[:, :24], attention_mask=mask[:, :24], use_cache=True).past_key_values
                    before = [x.data_ptr() for x in cache.layers[0].state] if triton else []
                    of_texts = len(maps)
                    results.append(model(ids[:, 24:], attention_mask=mask, past_key_values=cache).logits)
                    if before:
                        assert before == [x.data_ptr() for x in cache.layers[0].state], "written over"
        learned = "hedgehog" in spec or "hedgehog" in str(options)
        assert bool(forms) == (triton and spec != "window")
        assert len(windows) == (3 if triton and "window" in spec else 0), "two forwards and a token"
        assert bool(gates) == (triton and "gated" in spec)
        assert bool(maps) == (triton and learned)
        assert packed or not maps or len(maps) == of_texts + 2, "a token's query, and a key"
        assert bool(joins) == (triton and spec == "window+gated" and not learned), "trained as one"
        assert all(form.packed == packed for form in forms)
        runs.append([x.detach().float() for x in results])
    assert_near(*runs, tolerance)
