"""Every registered patch on every shape of model: properties that any attention must have, each with a
broken twin.

A property is a function that asserts. Beside the parametrised tests, each property is run once with the
package broken on purpose in a way that this property is there to notice; if it does not, the suite is worth
nothing.
"""

import pytest
import torch
from helpers.cases import CASES
from helpers.properties import (
    CAUSAL,
    CUTS,
    FAMILIES,
    FIRST,
    PAIRS,
    REPRESENTATIVES,
    VARIANTS,
    WHOLE,
    always,
    check_decode,
    check_forward,
    check_gradient,
    check_half_precision,
    check_no_leak,
    check_packing,
    check_padding,
    check_rows,
    check_save,
    check_unpatch,
    marked,
    model_of,
    serves,
)

from hf_linattn import available_patches, patch_model
from hf_linattn.attention import StatefulAttention
from hf_linattn.attention.visibility import Visibility
from hf_linattn.errors import NotPatchedError, UnsupportedModelError
from hf_linattn.ops import linear_attention
from hf_linattn.ops.eager import linear
from hf_linattn.patches.elu1 import Elu1
from hf_linattn.patches.softmax1 import Softmax1
from hf_linattn.patching import checkpoint
from hf_linattn.registry import parse

ONE_WAY = [
    case
    for case in CASES
    if any(part.directions != "both" for part in parse(CASES[case].spec, CASES[case].options).parts)
]


def test_every_patch_is_here():
    assert set(available_patches()) == {name for case in CASES.values() for name in case.spec.split("+")}


def test_every_run_has_every_case_and_every_family():
    found = [pair for pair in PAIRS if always(*pair)]
    assert {case for _, case in found} == set(CASES)
    assert {family for family, _ in found} == set(FAMILIES)


@pytest.mark.parametrize(("family", "case"), marked(PAIRS))
class TestEveryFamily:
    def test_forward_is_the_oracle(self, family, case):
        check_forward(family, case)

    def test_gradient_is_the_oracle(self, family, case):
        if CASES[case].smooth:
            check_gradient(family, case)

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding_changes_nothing(self, family, case, side):
        check_padding(family, case, side)


def halves():
    """Pairs with bfloat16, and with float16 in fewer families; of other options float16 with `-m full`."""
    for family, case in PAIRS:
        known = always(family, case, {})
        often = case in (FIRST if family == WHOLE else REPRESENTATIVES) or not serves(WHOLE, case)
        yield pytest.param(family, case, torch.bfloat16, marks=() if known else pytest.mark.full)
        if family in VARIANTS:
            marks = () if known and often else pytest.mark.full
            yield pytest.param(family, case, torch.float16, marks=marks)


@pytest.mark.parametrize(("family", "case", "dtype"), list(halves()), ids=str)
def test_half_precision(family, case, dtype):
    check_half_precision(family, case, dtype)


@pytest.mark.parametrize(("family", "case"), marked(PAIRS, {}))
def test_save_and_load(family, case, tmp_path):
    check_save(family, case, tmp_path)


@pytest.mark.parametrize(("family", "case"), marked(PAIRS, {}, half=0))
class TestThePatchAlone:
    """What depends on the patch and hardly on the model."""

    def test_rows_are_independent(self, family, case):
        check_rows(family, case)

    def test_unpatch_leaves_no_trace(self, family, case):
        check_unpatch(family, case)


@pytest.mark.parametrize(("family", "case"), marked(CAUSAL, half=1))
class TestCausalFamilies:
    def test_packed_documents_are_separate(self, family, case):
        check_packing(family, case)

    def test_nothing_leaks_from_the_future(self, family, case):
        check_no_leak(family, case)


@pytest.mark.parametrize(("family", "case"), marked(CAUSAL))
def test_decoding_is_the_forward(family, case):
    check_decode(family, case)


@pytest.mark.parametrize(("family", "case"), marked(CAUSAL, half=0))
def test_chunked_prefill_is_the_forward(family, case):
    check_decode(family, case, CUTS)


@pytest.mark.parametrize(("family", "case"), marked((pair for pair in PAIRS if pair[0] != "gemma3"), half=1))
def test_padding_inside_a_row_changes_nothing(family, case):
    """gemma3's own windows count columns, as in the unpatched model."""
    check_padding(family, case, "middle")


@pytest.mark.parametrize("case", ONE_WAY)
def test_the_other_direction_is_refused(case):
    family = "bert" if ("bert", case) not in PAIRS else "llama"
    with pytest.raises(UnsupportedModelError, match=r"only: .{20}"):
        patch_model(model_of(family), CASES[case].spec, options=CASES[case].options)


def broken_map(monkeypatch):
    monkeypatch.setattr(Elu1, "fused", "none")
    monkeypatch.setattr(Elu1, "key_map", lambda self, key: Elu1.feature_map(self, key) + 0.01)


def broken_kernel(monkeypatch):
    plain = linear_attention.attention

    def late(inputs, how, keep, backend):
        return plain(inputs._replace(key=inputs.key + 0.01), how, keep, backend)

    monkeypatch.setattr(linear_attention, "attention", late)


def lost_padding(monkeypatch):
    monkeypatch.setattr("hf_linattn.attention.stateful._new_columns", lambda documents, past, length: None)


def lost_documents(monkeypatch):
    monkeypatch.setattr("hf_linattn.attention.stateful._is_packed", lambda new, past, mask: False)


def backwards(monkeypatch):
    def whole(phi_q, phi_k, value, *others):
        state = linear.state_of(phi_k, value)
        return *linear.read(phi_q, state), state

    monkeypatch.setattr(linear, "causal", whole)
    monkeypatch.setattr("hf_linattn.attention.linear.choose_backend", lambda *inputs: "vectorised")


def mixed_rows(monkeypatch):
    plain = linear.state_of
    monkeypatch.setattr(
        linear, "state_of", lambda k, v: linear.State(*(x.mean(0, True).expand_as(x) for x in plain(k, v)))
    )
    monkeypatch.setattr("hf_linattn.attention.linear.choose_backend", lambda *inputs, **linked: "vectorised")


def lost_state(monkeypatch):
    plain = linear.causal
    monkeypatch.setattr(
        linear, "causal", lambda q, k, v, state, *others, **more: plain(q, k, v, None, *others)
    )


def half_state(monkeypatch):
    plain = StatefulAttention.attend

    def coarse(attention, call):
        output, weights = plain(attention, call)
        return output.mul(16).round().div(16), weights

    monkeypatch.setattr(StatefulAttention, "attend", coarse)


def left_behind(monkeypatch):
    monkeypatch.setattr("hf_linattn.patching.config.OwnConfigs.restore", lambda self: None)


def lost_entry(monkeypatch):
    plan = checkpoint._plan
    monkeypatch.setattr(
        checkpoint, "_plan", lambda model, groups: dict(sorted(plan(model, groups).items())[:1])
    )


def detached(monkeypatch):
    plain = Elu1.feature_map
    monkeypatch.setattr(Elu1, "fused", "none")
    monkeypatch.setattr(Elu1, "key_map", lambda self, key: plain(self, key).detach())


def no_sink(monkeypatch):
    monkeypatch.setattr(Softmax1, "sink_logit", lambda self, query: None)


def wrong_count(monkeypatch):
    plain = Visibility.count
    monkeypatch.setattr(Visibility, "count", lambda self, device: plain(self, device) + 1)


MUTANTS = {
    "forward, wrong map": (broken_map, lambda folder: check_forward("llama", "elu1", (65,))),
    "forward, wrong kernel": (broken_kernel, lambda folder: check_forward("llama", "elu1", (65,))),
    "forward, no sink": (no_sink, lambda folder: check_forward("llama", "softmax1", (65,))),
    "forward, wrong count": (wrong_count, lambda folder: check_forward("llama", "logn", (65,))),
    "gradient": (detached, lambda folder: check_gradient("llama", "elu1")),
    "padding": (lost_padding, lambda folder: check_padding("llama", "elu1")),
    "packing": (lost_documents, lambda folder: check_packing("llama", "elu1")),
    "leak": (backwards, lambda folder: check_no_leak("llama", "elu1")),
    "rows": (mixed_rows, lambda folder: check_rows("bert", "elu1")),
    "decode": (lost_state, lambda folder: check_decode("llama", "elu1")),
    "half precision": (
        half_state,
        lambda folder: check_half_precision("llama", "elu1", torch.float16, 0.005),
    ),
    "unpatch": (left_behind, lambda folder: check_unpatch("llama", "elu1")),
    "save": (lost_entry, lambda folder: check_save("llama", "elu1", folder)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_property_notices_its_broken_twin(name, monkeypatch, tmp_path):
    break_it, check = MUTANTS[name]
    check(tmp_path / "sound")
    break_it(monkeypatch)
    with pytest.raises((AssertionError, NotPatchedError)):
        check(tmp_path / "broken")
