"""Rules of generation: tokens, log-probs, distribution, ends."""

from __future__ import annotations

import dataclasses
from collections import Counter

import torch
from rollout.engine_contract.case import EngineCase, Rule
from torch import Tensor

from strop.rollout.types import Sampling, TokenOutput
from strop.utils.rng import random_key

LENGTHS = (1, 3, 4, 9, 17)
"""Of prompts that run side by side."""
NUM_DRAWS = 600
_MIN_EXPECTED = 5.0
"""Cells of the chi-square statistic with fewer expected draws are taken together."""
_Z = 5.0
"""Normal quantile of its limit: a correct engine fails once in three million keys, and the keys are fixed."""


def greedy(max_tokens: int) -> Sampling:
    """The most likely tokens."""
    return Sampling(key=0, temperature=0.0, max_tokens=max_tokens)


def sampled(
    *parts: int, max_tokens: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> Sampling:
    """Random tokens of a fixed key."""
    key = random_key(0, "conformance", *parts)
    return Sampling(key=key, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k)


async def token_ids(case: EngineCase) -> None:
    """Token ids in, token ids out.

    The response alone comes back: as many log-probs and versions as tokens, all of them of the model.
    """
    output = await case.ask(case.prompt(5, 0), sampled(0, max_tokens=12))
    count = len(output.token_ids)
    assert count == 12, f"12 tokens were asked for without a stop token, {count} came"
    lengths = {count, len(output.log_probs), len(output.versions)}
    assert len(lengths) == 1, f"tokens, log-probs and versions have the lengths {sorted(lengths)}"
    outside = [token for token in output.token_ids if not 0 <= token < case.model.vocab_size]
    assert not outside, f"tokens {outside} are not in the vocabulary of {case.model.vocab_size}"
    assert set(output.versions) == {case.engine.version}, (
        f"tokens carry the versions {sorted(set(output.versions))}, the engine is at {case.engine.version}"
    )


async def greedy_decoding(case: EngineCase) -> None:
    """Greedy decoding equals generate of transformers.

    Token by token, for prompts of several lengths side by side; only where the reference model's two most likely
    tokens are within the tolerance may another one follow.
    """
    prompts = [case.prompt(length, 50 + length) for length in LENGTHS]
    outputs = await case.ask_all([(prompt, greedy(12)) for prompt in prompts])
    for prompt, output in zip(prompts, outputs, strict=True):
        _is_greedy(case, prompt, output, num_tokens=12)


def _is_greedy(case: EngineCase, prompt: list[int], output: TokenOutput, *, num_tokens: int) -> None:
    wanted = case.model.greedy(prompt, num_tokens)
    found = list(output.token_ids)
    if found == wanted:
        return
    assert len(found) == len(wanted), f"{len(found)} tokens came in place of {len(wanted)}"
    place = next(i for i, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1])
    row = case.model.log_probs(prompt, found[:place])[-1]
    gap = float(row.max() - row[found[place]])
    assert gap <= 2 * case.tolerance, (
        f"token {place} after a prompt of {len(prompt)} is {found[place]}, which is {gap:.3g} nats less likely than "
        f"{wanted[place]}, the most likely one"
    )


async def log_probs(case: EngineCase) -> None:
    """Log-probs equal a full forward pass.

    At the sampling temperature over the whole vocabulary, also where top-k and top-p cut the sampling; at
    temperature 1 for greedy tokens.
    """
    for temperature, top_p, top_k in ((1.0, 1.0, 0), (0.7, 0.9, 0), (1.3, 1.0, 4)):
        options = {"max_tokens": 10, "temperature": temperature, "top_p": top_p}
        prompts = [case.prompt(length, length) for length in LENGTHS]
        asks = [sampled(n, top_k=top_k, **options) for n in range(len(prompts))]  # type: ignore[arg-type]
        outputs = await case.ask_all(list(zip(prompts, asks, strict=True)))
        for prompt, output in zip(prompts, outputs, strict=True):
            case.compare(prompt, output, temperature=temperature)
    prompt = case.prompt(6, 6)
    case.compare(prompt, await case.ask(prompt, greedy(10)))


async def distribution(case: EngineCase) -> None:
    """Samples follow the distribution.

    The first tokens of 600 keys, with and without temperature, top-k and top-p: chi-square against the reference model.
    """
    prompt = case.prompt(6, 9)
    for options in ({}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.5, "top_p": 0.8}):
        asks = [(prompt, sampled(n, max_tokens=1, **options)) for n in range(NUM_DRAWS)]  # type: ignore[arg-type]
        outputs = await case.ask_all(asks)
        row = case.model.log_probs(prompt, [], temperature=options.get("temperature", 1.0))[-1].exp()
        wanted = _cut(row, top_k=int(options.get("top_k", 0)), top_p=options.get("top_p", 1.0))
        _follows(Counter(output.token_ids[0] for output in outputs), wanted, f"{options or 'no options'}")


def _cut(probs: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """The distribution [V] that is left of `probs` [V]: the `top_k` most likely tokens, of these the smallest set with
    the share `top_p`."""
    kept = torch.zeros_like(probs)
    order = probs.argsort(descending=True)[: top_k or None]
    total, held = float(probs[order].sum()), 0.0
    for token in order.tolist():
        kept[token] = probs[token]
        held += float(probs[token])
        if held >= top_p * total:
            break
    return kept / kept.sum()


def _follows(counts: Counter[int], wanted: Tensor, where: str) -> None:
    impossible = sorted(token for token in counts if float(wanted[token]) == 0.0)
    assert not impossible, f"with {where}, tokens {impossible[:5]} came, which are cut off"
    expected = wanted * counts.total()
    single = [token for token in range(len(wanted)) if float(expected[token]) >= _MIN_EXPECTED]
    cells = [(float(counts[token]), float(expected[token])) for token in single]
    rest = counts.total() - sum(seen for seen, _ in cells), counts.total() - sum(mean for _, mean in cells)
    if rest[1] >= _MIN_EXPECTED:
        cells.append(rest)
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    freedom = max(1, len(cells) - 1)
    # Wilson and Hilferty 1931: the cube root of chi-square over its freedom is nearly normal.
    limit = freedom * (1 - 2 / (9 * freedom) + _Z * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic <= limit, (
        f"with {where}, {counts.total()} first tokens give chi-square {statistic:.1f} over {len(cells)} cells; at most "
        f"{limit:.1f} is chance"
    )


async def stop_tokens(case: EngineCase) -> None:
    """Stop tokens end a response and belong to it.

    The first one that comes, also at the last place that max_tokens allows; one that never comes does nothing.
    """
    prompt = case.prompt(4, 3)
    free = (await case.ask(prompt, greedy(16))).token_ids
    for place in (0, 3, 15):
        stop = free[place]
        end = free.index(stop)
        for limit in (16, end + 1):
            sampling = dataclasses.replace(greedy(limit), stop_token_ids=(stop,))
            output = await case.ask(prompt, sampling)
            assert (output.token_ids, output.stop_reason) == (free[: end + 1], "stop"), (
                f"stop token {stop}, due at place {end} with max_tokens={limit}: the response has "
                f"{len(output.token_ids)} tokens and ends by {output.stop_reason!r}"
            )


async def length_limit(case: EngineCase) -> None:
    """Max_tokens is exact.

    From one token to the last position of the model.
    """
    limits = [1, 2, 9]
    longest = case.model.max_positions
    if longest is not None and longest <= 512:
        limits.append(longest - 3)
    for limit in limits:
        output = await case.ask(case.prompt(3, 0), sampled(1, max_tokens=limit))
        assert (len(output.token_ids), output.stop_reason) == (limit, "length"), (
            f"max_tokens={limit}: {len(output.token_ids)} tokens, ended by {output.stop_reason!r}"
        )


async def ragged_batch(case: EngineCase) -> None:
    """Prompts and responses of very different lengths side by side.

    Each is what it is alone: greedy tokens and log-probs against the reference model.
    """
    longest = min(case.model.max_positions or 512, 512)
    shapes = [(longest - 8, 8), (1, longest // 2), (2, 1), (longest // 2, 2), (7, 21)] * 2
    prompts = [case.prompt(length, 70 + number) for number, (length, _) in enumerate(shapes)]
    outputs = await case.ask_all([(p, greedy(n)) for p, (_, n) in zip(prompts, shapes, strict=True)])
    for prompt, (_, limit), output in zip(prompts, shapes, outputs, strict=True):
        case.compare(prompt, output)
        if limit <= 21:
            _is_greedy(case, prompt, output, num_tokens=limit)


async def keys(case: EngineCase) -> None:
    """Tokens depend on the key alone.

    The same request alone, among others, and once more.
    """
    case.needs("keyed")
    prompt = case.prompt(6, 5)
    alone = [await case.ask(prompt, sampled(n, max_tokens=12)) for n in range(3)]
    asks = [(prompt, sampled(n, max_tokens=12)) for n in range(3)]
    others = [(case.prompt(length, length), sampled(90 + length, max_tokens=20)) for length in LENGTHS]
    for number, together in enumerate((await case.ask_all([*others, *asks]))[len(others) :]):
        assert together.token_ids == alone[number].token_ids, (
            f"key {number} gives {together.token_ids} among others and {alone[number].token_ids} alone"
        )
    assert len({one.token_ids for one in alone}) == 3, "three keys give the same tokens"


GENERATION: tuple[Rule, ...] = (
    token_ids,
    greedy_decoding,
    log_probs,
    distribution,
    stop_tokens,
    length_limit,
    ragged_batch,
    keys,
)
