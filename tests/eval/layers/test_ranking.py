"""Which layers stay softmax: scores, ties, noise, even distances, without a model."""

import math

import pytest
from helpers.fixtures_layers import stack

from hf_linattn.eval.layers.measure import Measured
from hf_linattn.eval.layers.model import OWN
from hf_linattn.eval.layers.ranking import (
    beyond_noise,
    even,
    noise_threshold,
    ordered,
    recall_over_perplexity,
    scores_of,
)


@pytest.mark.parametrize(
    ("recall", "nats", "want"),
    [
        ([0.0, 0.3, 0.1], [0.1, 0.7, 0.2], [0.0, 0.5, 1.0]),
        ([0.5, 0.3, 0.3], [0.2, 0.2, 0.9], [50.0, 0.0, 0.0]),  # the cheapest loses recall
        ([0.3, 0.3], [0.2, 0.2], [0.0, 0.0]),  # nothing over nothing
        ([0.2, 0.0], [0.1 + 1e-9, 0.1], [50.0, 0.0]),  # the cap
        ([0.1, 0.3 - 0.2], [0.2, 0.1], [0.0, 0.0]),  # rounding is no loss
        ([-0.1, 0.1], [-0.2, 0.2], [0.0, 0.5]),  # linear may be better
        ([0.4], [0.0], [0.0]),
    ],
)
def test_recall_over_perplexity(recall, nats, want):
    assert recall_over_perplexity(recall, nats) == pytest.approx(want)


def test_noise_is_no_recall():
    """As measured of a model whose first two layers carry recall: the cheapest layer must not come first."""
    lost, nats = [0.679, 0.719, 0.0003, -0.0048], [0.2934, 0.2276, 0.1841, 0.2092]
    assert recall_over_perplexity(lost, nats)[2] == 50
    scores = recall_over_perplexity(lost, nats, 1 / 30)
    assert scores[2:] == [0, 0]
    assert scores[:2] == pytest.approx([(0.679 + 0.0048) / 0.1093, (0.719 + 0.0048) / 0.0435])
    assert beyond_noise([0.02, 0.1, 0.0], 0.05) == pytest.approx([0, 0.1, 0])


def test_noise_is_two_errors_or_a_sample():
    def noise(*rows):
        return noise_threshold(
            Measured((), OWN, 1, 0, 1, None, 0, None, [dict(zip(keys, row, strict=True)) for row in rows])
        )

    keys = ("samples", "stderr", "accuracy", "chance")
    assert noise((10, 0.1, 0.5, 0), (30, 0.05, 0.6, 0)) == pytest.approx(2 * math.hypot(1, 1.5) / 40)
    assert noise((10, 0.0, 1, 0), (30, 0.0, 1, 0)) == 1 / 40
    assert noise((1, None, 1, 0)) == 1


def test_equal_scores_go_by_divergence_and_then_by_number():
    assert ordered(stack(4), [1.0, 2.0, 1.0, 1.0], {"kl": [0.1, 0.0, 0.3, 0.3]}) == [1, 2, 3, 0]


def test_equal_scores_go_by_the_log_probability_of_answers_first():
    """As measured of SmolLM2: one layer turns answers, another makes them a hundred times less likely."""
    values = {"kl": [0.0012, 0.0011, 0.0019, 0.0016], "logprob": [3.72, 6.93, 0.06, -0.2]}
    assert ordered(stack(4), [0.0, 50.0, 0.0, 0.0], values) == [1, 0, 2, 3]


def test_few_questions_rank_by_the_log_probability_of_their_answers():
    """As measured of six layers of SmolLM2 by six questions, of which the original answers four."""
    recall = [0.0, -0.333, 0.667, 0.167, -0.167, 0.0]
    lost = [-0.023, -0.028, 4.146, 0.347, 0.173, 0.148]
    kl = [0.0022, 0.0026, 0.0013, 0.0012, 0.0016, 0.0018]
    values = {"perplexity": [0.0] * 6, "kl": kl, "recall": recall, "logprob": lost}
    scores = scores_of(values, 1 / 6, "logprob")
    assert scores == {"logprob": [0, 0, *lost[2:]], "perplexity": [0.0] * 6, "kl": kl}
    assert ordered(stack(6), scores["logprob"], values) == [2, 3, 4, 5, 1, 0]
    # what a question more or less makes of the same: a layer that changes no answer costs as much as any
    assert scores_of(values, 1 / 6)["recall"][0] == pytest.approx(0.333)


@pytest.mark.parametrize(
    ("count", "keep", "want"),
    [
        (6, 0, ()),
        (6, 1, (3,)),
        (6, 2, (1, 4)),
        (6, 4, (0, 2, 3, 5)),
        (28, 7, tuple(range(2, 28, 4))),
        (1, 1, (0,)),
    ],
)
def test_even_distances(count, keep, want):
    assert even(stack(count), keep) == want
    assert even(stack(count), count) == tuple(range(count))
