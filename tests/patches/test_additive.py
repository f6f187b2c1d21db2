"""Additive scores: slices, and where they start."""

import torch
from helpers.properties import learned
from helpers.tiny_models import distance, llama

from hf_linattn import patch_model
from hf_linattn.patches import additive
from hf_linattn.patching.discovery import find_sites
from hf_linattn.registry import find


def patch_of(hidden):
    return find("additive")(find_sites(llama(1))[0], hidden=hidden).double()


def additive_inputs(queries=37):
    generator = torch.Generator().manual_seed(1)
    sizes = ((2, 4, queries, 8), (2, 2, 50, 8))
    return [torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]


def test_additive_slices_are_the_whole(monkeypatch):
    patch = patch_of(6)
    query, key = additive_inputs()
    inputs = (query, key, *patch.parameters())

    def run():
        scores = patch.scores(query, key, 0.5)
        return scores, torch.autograd.grad(scores.sin().sum(), inputs)

    sizes = []
    whole, want = run()
    plain = additive._pairs
    monkeypatch.setattr(additive, "SLICE", 20000)
    monkeypatch.setattr(
        additive, "_pairs", lambda *x: (sizes.append(x[0][..., 0].numel() * 50 * 6), plain(*x))[1]
    )
    sliced, got = run()
    assert max(sizes) <= 20000
    assert len(sizes) == 2 * 5  # slices of 8 queries in 37, computed again for the gradient
    assert distance(sliced, whole) < 1e-12
    for one, other in zip(got, want, strict=True):
        assert distance(one, other) < 1e-9


def test_additive_starts_from_its_seed_and_differs_by_layer():
    def start(**options):
        model = patch_model(llama(), "additive", options=options)
        return [m.linattn.additive.query_weight.detach() for m in learned(model)]

    torch.manual_seed(1)
    first = start()
    torch.manual_seed(2)
    assert torch.equal(first[0], start()[0])
    assert distance(first[0], first[1]) > 0.1
    assert distance(first[0], start(seed=1)[0]) > 0.1


def test_additive_scores_start_at_a_size_of_1():
    patch = patch_of(64)
    query, key = additive_inputs()
    assert 0.3 < float(patch.scores(query, key, 8**-0.5).detach().std()) < 1.5
