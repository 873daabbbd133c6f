"""Losses of preferences: by hand, by an independent sum in plain Python, and their derivatives by differences."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from default_cases import draws
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.losses.preference import Batch, Weighed, weigh
from strop.config.errors import ConfigError
from strop.config.load import config_of
from strop.data.preference_config import PreferConfig

LOSSES = ["sigmoid", "hinge", "ipo", "kto", "orpo", "simpo", "reward"]


def batch(
    numbers: list[list[float]],
    reference: list[list[float]] | None = None,
    lengths: list[list[float]] | None = None,
    good: list[bool] | None = None,
    margins: list[float] | None = None,
) -> Batch:
    n = len(numbers)
    return Batch(
        numbers=torch.tensor(numbers, dtype=torch.float64),
        reference=torch.tensor(reference or [[0.0, 0.0]] * n, dtype=torch.float64),
        lengths=torch.tensor(lengths or [[1.0, 1.0]] * n, dtype=torch.float64),
        margins=torch.tensor(margins or [0.0] * n, dtype=torch.float64),
        is_good=torch.tensor(good or [True] * n),
    )


def test_dpo_by_hand() -> None:
    """beta ((-1 + 2) - (-3 + 1)) = 0.5 * 3 = 1.5; its gradient by the better answer is -beta * sigmoid(-1.5)."""
    found = weigh(PreferConfig(beta=0.5), batch([[-1.0, -3.0]], [[-2.0, -1.0]]))
    assert found.loss == pytest.approx(math.log1p(math.exp(-1.5)))
    pull = 0.5 / (1 + math.exp(1.5))
    assert found.weights.tolist() == [[pytest.approx(-pull), pytest.approx(pull)]]
    assert found.metrics["rewards/chosen"] == 0.5
    assert found.metrics["rewards/rejected"] == -1.0
    assert (found.metrics["rewards/margins"], found.metrics["rewards/accuracies"]) == (1.5, 1.0)
    assert (found.metrics["logps/chosen"], found.metrics["logps/rejected"]) == (-1.0, -3.0)


def test_at_the_start_dpo_is_ln_2_and_pulls_with_half_of_beta() -> None:
    found = weigh(PreferConfig(beta=0.2), batch([[-5.0, -7.0], [-1.0, -2.0]], [[-5.0, -7.0], [-1.0, -2.0]]))
    assert found.loss == pytest.approx(math.log(2))
    assert (
        found.weights.tolist() == [[pytest.approx(-0.05), pytest.approx(0.05)]] * 2
    )  # beta / 2, over two rows


def test_ipo_by_hand() -> None:
    """Means: (-4 + 6) / 2 = 1 and (-9 + 3) / 3 = -2; (1 + 2 - 1 / (2 * 0.25))^2 = 1."""
    found = weigh(PreferConfig(loss="ipo", beta=0.25), batch([[-4.0, -9.0]], [[-6.0, -3.0]], [[2.0, 3.0]]))
    assert found.loss == pytest.approx(1.0)
    assert found.weights.tolist() == [[pytest.approx(2 / 2), pytest.approx(-2 / 3)]]


def test_simpo_by_hand() -> None:
    """Means -2 and -3: -log sigmoid(2 (-2 + 3) - 0.5), whatever the reference says."""
    config = PreferConfig(loss="simpo", beta=2.0, simpo_gamma=0.5)
    found = weigh(config, batch([[-4.0, -9.0]], [[7.0, 7.0]], [[2.0, 3.0]]))
    assert found.loss == pytest.approx(math.log1p(math.exp(-1.5)))
    pull = 2.0 / (1 + math.exp(1.5))
    assert found.weights.tolist() == [[pytest.approx(-pull / 2), pytest.approx(pull / 3)]]
    assert (found.metrics["rewards/chosen"], found.metrics["rewards/rejected"]) == (-4.0, -6.0)


def test_orpo_by_hand() -> None:
    """Means ln 1/2 and ln 1/4: odds 1 and 1/3, so ln 2 - 0.1 log sigmoid(ln 3) = ln 2 + 0.1 ln 4/3."""
    found = weigh(
        PreferConfig(loss="orpo"), batch([[-2 * math.log(2), -math.log(4)]], [[7.0, 7.0]], [[2.0, 1.0]])
    )
    assert found.loss == pytest.approx(math.log(2) + 0.1 * math.log(4 / 3))
    certain = weigh(PreferConfig(loss="orpo"), batch([[0.0, -1.0]]))
    assert math.isfinite(certain.loss)
    assert bool(certain.weights.isfinite().all()), "an answer of which the policy is certain"


def test_an_answer_that_is_no_better_counts_half() -> None:
    at = batch([[-1.0, -3.0], [-3.0, -1.0], [-2.0, -2.0], [-2.0, -2.0 - 1e-12]])
    assert weigh(PreferConfig(), at).metrics["rewards/accuracies"] == 0.5
    assert weigh(PreferConfig(loss="reward"), at).metrics["rewards/accuracies"] == 0.5


def test_kto_by_hand() -> None:
    """Answers to other prompts stand 0.4 and 0.2 above the reference: z = 0.3, which is not trained."""
    config = PreferConfig(loss="kto", beta=2.0, desirable_weight=3.0, undesirable_weight=0.5)
    found = weigh(config, batch([[1.3, 0.4], [0.3, 0.2]], good=[True, False]))
    good, bad = 1 / (1 + math.exp(-2.0)), 0.5  # sigmoid(2 (1.3 - 0.3)), sigmoid(0)
    assert found.metrics["kl"] == pytest.approx(0.3)
    assert found.loss == pytest.approx((3.0 * (1 - good) + 0.5 * (1 - bad)) / 2)
    expected = [[-3.0 * 2 * good * (1 - good) / 2, 0.0], [0.5 * 2 * 0.25 / 2, 0.0]]
    assert found.weights.tolist() == [pytest.approx(row) for row in expected]
    assert (found.metrics["rewards/chosen"], found.metrics["rewards/rejected"]) == (2.6, 0.6)
    assert (found.metrics["logps/chosen"], found.metrics["logps/rejected"]) == (1.3, 0.3)
    assert found.metrics["rewards/margins"] == 2.0


def test_kto_knows_no_distance_below_nothing() -> None:
    found = weigh(PreferConfig(loss="kto"), batch([[0.0, -0.4], [0.0, -0.2]], good=[True, True]))
    assert found.metrics["kl"] == 0.0
    assert not {"rewards/rejected", "logps/rejected", "rewards/margins"} & found.metrics.keys()


def test_a_reward_model_by_hand() -> None:
    """-log sigmoid(2 - 1) + 0.01 (2 + 1)^2."""
    found = weigh(PreferConfig(loss="reward", center_coef=0.01), batch([[2.0, 1.0]]))
    assert found.loss == pytest.approx(math.log1p(math.exp(-1)) + 0.09)
    pull = 1 / (1 + math.exp(1))
    assert found.weights.tolist() == [[pytest.approx(-pull + 0.06), pytest.approx(pull + 0.06)]]


def test_a_margin_of_a_row_is_to_be_won() -> None:
    """-log sigmoid(2 - 1 - 0.5), and as it is for the row without one."""
    found = weigh(PreferConfig(loss="reward"), batch([[2.0, 1.0], [2.0, 1.0]], margins=[0.5, 0.0]))
    assert found.loss == pytest.approx((math.log1p(math.exp(-0.5)) + math.log1p(math.exp(-1))) / 2)


def test_imitation_of_better_answers_is_a_mean_over_their_tokens() -> None:
    at = batch([[-6.0, -3.0]], [[-6.0, -3.0]], [[4.0, 1.0]])
    found = weigh(PreferConfig(nll_coef=0.5), at)
    assert found.loss == pytest.approx(math.log(2) + 0.5 * 6 / 4)
    assert found.weights.tolist() == [[pytest.approx(-0.05 - 0.5 / 4), pytest.approx(0.05)]]


def plain(config: PreferConfig, at: Batch) -> float:
    """The same sums, written out in plain Python."""
    terms = []
    ratios = (at.numbers - at.reference).tolist()
    distance = max(0.0, sum(row[1] for row in ratios) / len(ratios))
    for number, (one, other) in enumerate(ratios):
        margin = config.beta * (one - other)
        imitation = -config.nll_coef * float(at.numbers[number, 0]) / float(at.lengths[number, 0])
        match config.loss:
            case "sigmoid":
                right, wrong = (math.log(1 / (1 + math.exp(-sign * margin))) for sign in (1, -1))
                smooth = config.label_smoothing
                terms.append(-(1 - smooth) * right - smooth * wrong + imitation)
            case "hinge":
                terms.append(max(0.0, 1 - margin) + imitation)
            case "ipo":
                means = [
                    ratio / length
                    for ratio, length in zip((one, other), at.lengths[number].tolist(), strict=True)
                ]
                terms.append((means[0] - means[1] - 0.5 / config.beta) ** 2 + imitation)
            case "simpo":
                means = [
                    sum_ / n
                    for sum_, n in zip(at.numbers[number].tolist(), at.lengths[number].tolist(), strict=True)
                ]
                lost = config.simpo_gamma - config.beta * (means[0] - means[1])
                terms.append(math.log1p(math.exp(lost)) + imitation)
            case "orpo":
                odds = []
                for sum_, n in zip(at.numbers[number].tolist(), at.lengths[number].tolist(), strict=True):
                    p = math.exp(sum_ / n)
                    odds.append(math.log(p / (1 - p)))
                lost = math.log1p(math.exp(odds[1] - odds[0]))
                terms.append(config.beta * lost - float(at.numbers[number, 0] / at.lengths[number, 0]))
            case "kto":
                above = config.beta * (one - distance)
                good = bool(at.is_good[number])
                value = 1 / (1 + math.exp(-above if good else above))
                terms.append((config.desirable_weight if good else config.undesirable_weight) * (1 - value))
            case "reward":
                scores = at.numbers[number].tolist()
                lost = float(at.margins[number]) + scores[1] - scores[0]
                terms.append(math.log1p(math.exp(lost)) + config.center_coef * sum(scores) ** 2)
    return sum(terms) / len(terms)


SETTINGS: dict[str, dict[str, Any]] = {
    "sigmoid": {"beta": 0.7, "label_smoothing": 0.2, "nll_coef": 0.3},
    "hinge": {"beta": 0.3},
    "ipo": {"beta": 0.4, "nll_coef": 0.1},
    "orpo": {"beta": 0.3},
    "simpo": {"beta": 2.0, "simpo_gamma": 0.8, "nll_coef": 0.2},
    "kto": {"beta": 0.6, "desirable_weight": 1.5, "undesirable_weight": 0.7},
    "reward": {"center_coef": 0.05},
}


@pytest.mark.draws
@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=draws(25, by_default=8), deadline=None)
@given(data=st.data())
def test_loss_and_derivative_are_those_of_plain_sums(loss: Any, data: st.DataObject) -> None:
    config = PreferConfig(loss=loss, **SETTINGS[loss])
    number = st.floats(-4, 4).map(lambda one: round(one, 3))
    rows = data.draw(st.integers(1, 4))

    def drawn(values: st.SearchStrategy[float]) -> list[list[float]]:
        return data.draw(st.lists(st.tuples(values, values).map(list), min_size=rows, max_size=rows))

    at = batch(drawn(number), drawn(number), drawn(st.integers(1, 9).map(float)), data.draw(
        st.lists(st.booleans(), min_size=rows, max_size=rows)
    ))  # fmt: skip
    if loss == "reward":
        at = batch(at.numbers.tolist(), margins=data.draw(st.lists(number, min_size=rows, max_size=rows)))
    if loss == "orpo":  # of log-probs, which are below 0
        at = dataclasses.replace(at, numbers=-at.numbers.abs() - 0.1)
    found = weigh(config, at)
    assert found.loss == pytest.approx(plain(config, at), rel=1e-9, abs=1e-12)
    step = 1e-6
    for row in range(rows):
        for side in range(2):
            if loss == "kto" and side == 1:  # the distance is not trained
                assert found.weights[row, side] == 0
                continue
            moved = [plain(config, shifted(at, row, side, sign * step)) for sign in (1, -1)]
            slope = (moved[0] - moved[1]) / (2 * step)
            margin = config.beta * float(
                (at.numbers - at.reference)[row] @ torch.tensor([1.0, -1.0]).double()
            )
            if loss == "hinge" and abs(margin - 1) < 1e-4:
                continue  # its corner
            assert float(found.weights[row, side]) == pytest.approx(slope, abs=1e-6)


def shifted(at: Batch, row: int, side: int, by: float) -> Batch:
    numbers = at.numbers.clone()
    numbers[row, side] += by
    return dataclasses.replace(at, numbers=numbers)


@pytest.mark.parametrize(
    ("given_settings", "sentence"),
    [
        ({"loss": "reward", "beta": 0.2}, "prefer.beta is 0.2, which prefer.loss=reward does not read"),
        ({"center_coef": 0.1}, "prefer.center_coef is 0.1, which prefer.loss=sigmoid does not read"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "use sigmoid"),
        ({"desirable_weight": 2.0}, "use kto"),
        ({"loss": "kto", "nll_coef": 1.0}, "use sigmoid or hinge or ipo or simpo"),
        ({"simpo_gamma": 0.1}, "use simpo"),
        ({"label_smoothing": 0.5}, "use a number below 0.5"),
        ({"engine": {"max_tokens_per_device": 1024}}, "raise the first above that"),
    ],
)
def test_settings_that_do_nothing_are_refused(given_settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config_of(PreferConfig, given_settings)


def test_what_is_said_of_a_batch_is_of_that_batch() -> None:
    found: Weighed = weigh(PreferConfig(), batch([[0.0, -1.0], [-2.0, -1.0], [0.0, -3.0], [-1.0, -1.0]]))
    assert found.metrics["rewards/accuracies"] == 2.5 / 4
    assert found.metrics["rewards/margins"] == pytest.approx(0.1 * (1 - 1 + 3 + 0) / 4)
