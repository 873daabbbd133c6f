"""Sampling: the token of a row is a pure function of its logits, options, key and position."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.engines.head import BANNED_LOGIT
from strop.rollout.native import sampling
from strop.rollout.native.cpu import kernel
from strop.rollout.native.sample_kernel import BLOCK, GREEDY
from strop.rollout.native.sampling import SEQUENCE, Rows, invert_in_blocks, next_tokens
from strop.utils.rng import random_key, uniforms

LOGITS = torch.log(torch.tensor([0.30, 0.05, 0.25, 0.20, 0.15, 0.05], dtype=torch.float64))
DRAWS = 20_000


def rows_of(count: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Rows:
    """Rows with keys of their own and these options."""
    rows = np.zeros(count, dtype=SEQUENCE)
    rows["temperature"][:], rows["top_p"][:], rows["top_k"][:] = temperature, top_p, top_k
    rows["key"][:] = [random_key(0, "test", index) for index in range(count)]
    return rows


def shares(logits: Tensor, rows: Rows) -> list[float]:
    """How often each token was drawn."""
    drawn, _ = next_tokens(logits.expand(DRAWS, -1), rows)
    return (torch.bincount(drawn, minlength=len(logits)) / DRAWS).tolist()


def check_distribution(seen: list[float], wanted: list[float]) -> None:
    """No token outside the support; chi-square below its 99.9 % point (20.5 for 5 degrees of freedom)."""
    assert [share > 0 for share in seen] == [share > 0 for share in wanted]
    chi_square = sum(DRAWS * (s - w) ** 2 / w for s, w in zip(seen, wanted, strict=True) if w > 0)
    assert chi_square < 20.5, seen


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [0.30, 0.05, 0.25, 0.20, 0.15, 0.05]),
        ({"top_k": 2}, [0.30 / 0.55, 0, 0.25 / 0.55, 0, 0, 0]),
        ({"top_k": 6}, [0.30, 0.05, 0.25, 0.20, 0.15, 0.05]),
        ({"top_k": 100}, [0.30, 0.05, 0.25, 0.20, 0.15, 0.05]),
        # 0.30 + 0.25 = 0.55 < 0.6: the third token is needed to reach 0.6.
        ({"top_p": 0.6}, [0.30 / 0.75, 0, 0.25 / 0.75, 0.20 / 0.75, 0, 0]),
        ({"top_p": 0.5}, [0.30 / 0.55, 0, 0.25 / 0.55, 0, 0, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0, 0, 0]),
        # top-p is a share of what top-k leaves: 0.30 / 0.75 = 0.4 < 0.6, (0.30 + 0.25) / 0.75 = 0.73.
        ({"top_k": 3, "top_p": 0.6}, [0.30 / 0.55, 0, 0.25 / 0.55, 0, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0, 0, 0]),
    ],
)
def test_support_and_distribution(options: dict[str, float], wanted: list[float]) -> None:
    check_distribution(shares(LOGITS, rows_of(DRAWS, **options)), wanted)  # type: ignore[arg-type]


def test_ties_at_the_cut_keep_the_first_token() -> None:
    # Tokens 1 and 5 have probability 0.05 each; top-k of 5 keeps token 1.
    seen = shares(LOGITS, rows_of(DRAWS, top_k=5))
    assert seen[1] > 0
    assert seen[5] == 0


def test_top_p_that_is_reached_exactly_takes_no_further_token() -> None:
    # Two of four tokens of probability 1/4 make up one half.
    seen = shares(torch.zeros(4, dtype=torch.float64), rows_of(DRAWS, top_p=0.5))
    assert [share > 0 for share in seen] == [True, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_raises_probabilities_to_its_inverse(temperature: float, dtype: torch.dtype) -> None:
    powers = [math.exp(float(x) / temperature) for x in LOGITS]
    seen = shares(LOGITS.to(dtype), rows_of(DRAWS, temperature=temperature))
    check_distribution(seen, [p / sum(powers) for p in powers])


def test_top_p_cuts_after_the_temperature() -> None:
    # At temperature 0.5 the probabilities are squared: 0.09, 0.0025, 0.0625, 0.04, 0.0225, 0.0025 of 0.22;
    # 0.09 / 0.22 = 0.41 < 0.65 < 0.1525 / 0.22 = 0.69. At temperature 1, top-p of 0.65 would keep three.
    seen = shares(LOGITS, rows_of(DRAWS, temperature=0.5, top_p=0.65))
    check_distribution(seen, [0.09 / 0.1525, 0, 0.0625 / 0.1525, 0, 0, 0])


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_a_token_is_the_inverse_of_the_cumulative_distribution(dtype: torch.dtype, rounding: float) -> None:
    rows = rows_of(500)
    rows["position"][:] = np.arange(500) % 7
    u = uniforms(rows["key"], rows["position"])
    drawn, _ = next_tokens(LOGITS.to(dtype).expand(500, -1), rows)
    probs = LOGITS.exp().tolist()
    for token, number in zip(drawn.tolist(), u.tolist(), strict=True):
        below = sum(probs[:token])
        assert below - rounding <= number <= below + probs[token] + rounding


def test_log_probs_are_those_of_the_whole_distribution_at_the_temperature() -> None:
    for temperature in (1.0, 0.7):
        rows = rows_of(64, temperature=temperature, top_p=0.5, top_k=3)
        drawn, log_probs = next_tokens(LOGITS.expand(64, -1), rows)
        wanted = torch.log_softmax(LOGITS / temperature, -1)[drawn]
        torch.testing.assert_close(log_probs, wanted, atol=1e-12, rtol=1e-12)


def test_temperature_zero_takes_the_most_likely_token_at_temperature_one() -> None:
    logits = LOGITS.expand(8, -1)
    drawn, log_probs = next_tokens(logits, rows_of(8, temperature=0.0))
    assert drawn.tolist() == [0] * 8
    assert log_probs.tolist() == pytest.approx([math.log(0.30)] * 8)
    drawn, log_probs = next_tokens(logits.float(), rows_of(8, temperature=0.0))
    assert drawn.tolist() == [0] * 8
    assert log_probs.tolist() == pytest.approx([math.log(0.30)] * 8)
    # Beside rows that sample, greedy rows stay greedy, and the others draw what they draw alone.
    mixed = rows_of(8)
    mixed["temperature"][::2] = 0.0
    drawn, log_probs = next_tokens(logits, mixed)
    alone, _ = next_tokens(logits, rows_of(8))
    assert drawn[::2].tolist() == [0] * 4
    assert drawn[1::2].tolist() == alone[1::2].tolist()
    assert log_probs[::2].tolist() == pytest.approx([math.log(0.30)] * 4)


def test_positions_advance_and_give_other_numbers() -> None:
    rows = rows_of(200)
    first, _ = next_tokens(LOGITS.expand(200, -1), rows)
    assert rows["position"].tolist() == [1] * 200
    second, _ = next_tokens(LOGITS.expand(200, -1), rows)
    # Equal by chance with probability sum p^2 = 0.22.
    assert 0.1 < float((first == second).double().mean()) < 0.35


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_row_does_not_depend_on_the_rows_beside_it(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 6))
    options = st.tuples(
        st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.3, 0.9, 1.0]), st.sampled_from([0, 1, 3])
    )
    chosen = data.draw(st.lists(options, min_size=count, max_size=count))
    logits = torch.randn(count, 11, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    rows = rows_of(count)
    for index, (temperature, top_p, top_k) in enumerate(chosen):
        rows["temperature"][index], rows["top_p"][index], rows["top_k"][index] = temperature, top_p, top_k
    together, log_probs = next_tokens(logits, rows)
    for index, (temperature, top_p, top_k) in enumerate(chosen):
        alone = rows_of(1, temperature=temperature, top_p=top_p, top_k=top_k)
        alone["key"][0] = rows["key"][index]
        token, log_prob = next_tokens(logits[index : index + 1], alone)
        assert token.item() == together[index].item()
        assert log_prob.item() == log_probs[index].item()


def test_extreme_logits_and_numbers_stay_inside_the_support() -> None:
    # One token has all the probability; the others underflow to 0 and are never drawn.
    logits = torch.full((1000, 4), -1e4)
    logits[:, 2] = 1e4
    drawn, log_probs = next_tokens(logits, rows_of(1000))
    assert set(drawn.tolist()) == {2}
    assert set(log_probs.tolist()) == {0.0}


@pytest.mark.parametrize("vocab", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_compiled_rows_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, vocab: int, temperature: float
) -> None:
    assert kernel.sample_kernel() is not None, "gcc is here"
    logits = 3 * torch.randn(40, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[:, vocab // 3 : vocab // 2] = BANNED_LOGIT
    given = logits.clone()
    compiled, rows = next_tokens(logits, rows_of(40, temperature=temperature)), rows_of(40)
    assert torch.equal(logits, given)
    rows["temperature"] = temperature
    monkeypatch.setattr(kernel, "sample", lambda *_: None)
    tokens, log_probs = next_tokens(logits.double(), rows)
    assert compiled[0].tolist() == tokens.tolist()
    torch.testing.assert_close(compiled[1].double(), log_probs, atol=1e-5, rtol=1e-6)


def test_the_ends_of_the_cumulative_distribution_are_tokens_that_can_be_drawn() -> None:
    compiled = kernel.sample_kernel()
    assert compiled is not None
    logits = torch.zeros(4, 600)
    logits[:, :200] = logits[:, 400:] = (
        BANNED_LOGIT  # blocks of 128 begin and end with such tokens, or have no other
    )
    numbers = np.array([0.0, 2.0**-53, 1 - 2.0**-53, 0.5])
    tokens, log_probs = compiled.sample(logits, np.ones(4), numbers)
    assert tokens.tolist() == [200, 200, 399, 300]
    torch.testing.assert_close(log_probs, torch.full((4,), -math.log(200)))


def test_rounding_of_a_blocks_sum_gives_no_token_that_cannot_be_drawn() -> None:
    """A block is summed in float and gone through in double, which may end below the number that was looked for."""
    compiled = kernel.sample_kernel()
    assert compiled is not None
    logits = torch.randn(50, 384, generator=torch.Generator().manual_seed(0))
    logits[:, 128:140] = logits[:, 256:] = BANNED_LOGIT
    exps = logits.double().exp()
    ends = torch.stack([exps[:, :128].sum(-1), exps.sum(-1)]) / exps.sum(-1)  # of the blocks
    for shift in np.linspace(-1e-7, 1e-7, 41):
        for end in ends:
            numbers = np.clip(end.numpy() + shift, 0, 1 - 2.0**-53)
            tokens, _ = compiled.sample(logits, np.ones(50), numbers)
            assert bool((logits.gather(1, tokens[:, None]) > BANNED_LOGIT).all())


def test_numbers_that_are_none_give_a_token_all_the_same() -> None:
    """What finds them is the trainer, which says where they came from."""
    tokens, log_probs = next_tokens(torch.full((3, 300), math.nan), rows_of(3))
    assert all(0 <= token < 300 for token in tokens.tolist())
    assert log_probs.isnan().all()


def test_a_row_gets_the_same_token_beside_one_that_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the kernel's sums were rounded so that another token is found.
    monkeypatch.setattr(sampling, "has_kernels", lambda device: True)
    monkeypatch.setattr(sampling.kernel, "sample", lambda *given: None)

    def draw(logits: Tensor, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens = torch.where(draws[:, 0] == GREEDY, logits.argmax(-1), 7)
        return tokens, torch.zeros(len(logits)), torch.logsumexp(logits / draws[:, 1:].float(), -1)

    monkeypatch.setattr(sampling.sample_kernel, "draw", draw)
    logits = torch.randn(3, 3 * BLOCK, generator=torch.Generator().manual_seed(0))
    rows = rows_of(3)
    (alone,) = next_tokens(logits[1:2], rows[1:2].copy())[0].tolist()
    assert alone == 7, "by the kernel"
    rows["top_k"][0], rows["temperature"][2], rows["top_p"][2] = 3, 0.0, 0.5
    tokens, log_probs = next_tokens(logits, rows.copy())
    assert tokens[1] == alone
    assert tokens[0] in logits[0].topk(3)[1]
    assert log_probs[0] == torch.log_softmax(logits[0], -1)[tokens[0]]
    assert tokens[2] == logits[2].argmax()
    assert next_tokens(logits[1:], rows[1:].copy())[0].tolist() == tokens[1:].tolist(), "beside a greedy one"


@pytest.mark.parametrize("vocab", [5, 1024, 1025, 3000])
def test_sums_of_blocks_find_the_token_of_the_whole_row(vocab: int) -> None:
    # What an accelerator samples: the place where the cumulative sum passes u times the total.
    generator = torch.Generator().manual_seed(vocab)
    probs = torch.rand(64, vocab, generator=generator)
    probs[:, ::3] = 0.0
    probs[:, vocab // 2 :] *= (torch.rand(64, 1, generator=generator) < 0.5).float()  # some end in zeros
    probs[:, 1] += 1e-3
    edges = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    u = torch.cat([edges, torch.rand(62, dtype=torch.float64, generator=generator)])
    found = invert_in_blocks(probs, u)
    exact = probs.double().cumsum(-1)
    for row, token in enumerate(found.tolist()):
        assert probs[row, token] > 0
        target = float(u[row]) * float(exact[row, -1])
        before = float(exact[row, token - 1]) if token else 0.0
        assert before - 1e-9 <= target <= float(exact[row, token]) + 1e-9
