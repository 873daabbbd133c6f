"""Keys and values in pages: who owns which, what a group shares, what a sequence that ends costs, and that every answer
is that of slots."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from default_cases import by_default, draws
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_cases import Ask, answers, generate_all, run, token_ids, tokens, turns
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from strop.engines.attention_form import AttentionForm
from strop.engines.causal_lm import CausalLM
from strop.rollout.native import batch as batch_module
from strop.rollout.native import paged_cache, running
from strop.rollout.native.batch import DecodeBatch
from strop.rollout.native.cache import DecodeAttention, SlotCache
from strop.rollout.native.cpu import kernel
from strop.rollout.native.engine import NativeEngine
from strop.rollout.native.key_values import Computed, Entrant
from strop.rollout.native.paged_cache import PagedCache
from strop.rollout.native.pages import NOBODYS, PagePool
from strop.rollout.native.prefill import Prefill
from strop.rollout.native.request import Request
from strop.rollout.types import Sampling
from strop.utils.rng import random_key

Tiny = Callable[..., CausalLM]
CPU = torch.device("cpu")
PAGE = 4
PAGE_BYTES = 2 * 2 * 2 * 8 * 4 * PAGE  # keys and values, layers, key heads, head size, float32, tokens
DRIVER_ERROR = RuntimeError("CUDA driver error: out of memory")


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_cache, "PAGE_TOKENS", PAGE)


@pytest.fixture
def in_pages(small_pages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that generate as on an accelerator."""
    monkeypatch.setattr(running, "new_cache", lambda device, capacity: PagedCache(capacity, device))
    monkeypatch.setattr(batch_module, "fused_step", lambda model: None)


def sampled(index: int, max_tokens: int, **how: object) -> Sampling:
    return Sampling(key=random_key(0, "pages", index), max_tokens=max_tokens, **how)  # type: ignore[arg-type]


def steps(batch: DecodeBatch, count: int) -> None:
    for _ in range(count):
        batch.step(0)


def pages_of(batch: DecodeBatch) -> PagedCache:
    cache = batch._cache
    assert isinstance(cache, PagedCache)
    return cache


def bounded(monkeypatch: pytest.MonkeyPatch, num_pages: int) -> None:
    """A pool of at most so many pages; a larger one has room where that is so beside the old one."""

    def free(cache: PagedCache) -> float:
        states = cache._expected[0] * cache.state_bytes
        return (num_pages * PAGE_BYTES + states) / paged_cache.POOL_SHARE + 1 - cache.held_bytes

    monkeypatch.setattr(PagedCache, "_free_bytes", property(free))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_page_is_owned_twice_and_none_is_lost(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6))
    pool = PagePool(size)
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 30))):
        what = data.draw(st.sampled_from(["take", "share", "drop", "grow"]))
        if what == "take":
            held.append(pool.take(data.draw(st.integers(0, pool.num_free))))
            others = {page for pages in held[:-1] for page in pages}
            assert not others & set(held[-1])
            assert len(set(held[-1])) == len(held[-1])
            assert NOBODYS not in held[-1]
        elif what == "share" and held:
            held.append(list(data.draw(st.sampled_from(held))))
            pool.share(held[-1])
        elif what == "drop" and held:
            pool.drop(held.pop(data.draw(st.integers(0, len(held) - 1))))
        elif what == "grow":
            size += data.draw(st.integers(0, 3))
            pool.grow(size)
        owned = {page for pages in held for page in pages}
        assert (pool.num_used, pool.num_free) == (len(owned), size - 1 - len(owned))
    for pages in held:
        pool.drop(pages)
    assert sorted(pool.take(pool.num_free)) == list(range(1, size)), "all are there, each once"


class Model:
    """What a cache must hold: plain tensors of every slot and of everything that was kept."""

    def __init__(self) -> None:
        self.cache = PagedCache(5, CPU)
        self.slots: list[Tensor] = []
        self.kept: list[tuple[Computed, Tensor]] = []
        self.generator = torch.Generator().manual_seed(0)

    def random(self, count: int) -> Tensor:
        return torch.randn(2, 2, 2, count, 3, generator=self.generator)

    @property
    def lengths(self) -> np.ndarray:
        return np.array([slot.shape[3] for slot in self.slots], dtype=np.int64)

    def put(self, before: int | None, count: int) -> None:
        computed, wanted = (None, self.random(0)) if before is None else self.kept[before]
        new = self.random(count)
        put = self.cache.put(new, before=computed, state_bytes=0)
        assert put is not None, "the machine has the memory"
        self.kept.append((put, torch.cat([wanted, new], dim=3)))

    def first(self, which: int, count: int) -> None:
        computed, wanted = self.kept[which]
        self.kept.append((computed.first(count), wanted[:, :, :, :count]))

    def enter(self, which: int, count: int) -> None:
        computed, wanted = self.kept[which]
        slots = range(len(self.slots), len(self.slots) + count)
        assert self.cache.enter(slots, computed, longest=0) == count
        self.slots += [wanted] * count

    def step(self) -> None:
        assert self.cache.reserve(self.lengths)
        at, new = torch.from_numpy(self.lengths), self.random(len(self.slots))
        for layer in range(2):
            rows = torch.arange(len(self.slots))
            self.cache.append(layer, rows, at, *(part.transpose(0, 1) for part in new[:, layer]))
        self.slots = [
            torch.cat([slot, new[:, :, :, row : row + 1]], dim=3) for row, slot in enumerate(self.slots)
        ]

    def end(self, slot: int, *, is_kept: bool) -> None:
        length, last = self.slots[slot].shape[3], len(self.slots) - 1
        if is_kept:
            self.kept.append((self.cache.computed(slot, length).kept(), self.slots[slot]))
        self.cache.release(slot)
        if slot != last:
            self.cache.move(last, slot, self.slots[last].shape[3])
            self.slots[slot] = self.slots[last]
        self.slots.pop()

    def check(self) -> None:
        for computed, wanted in self.kept:
            assert torch.equal(computed.read(), wanted)
        if not self.slots or self.cache._table is None or self.cache._num_changed:
            return
        longest = int(self.lengths.max())
        for layer in range(2):
            found = self.cache.layer(layer, len(self.slots), longest)
            for row, slot in enumerate(self.slots):
                for part, wanted in zip(found, slot[:, layer], strict=True):
                    assert torch.equal(part[row, :, : wanted.shape[1]], wanted)


@pytest.mark.draws
@settings(max_examples=draws(60, by_default=20), deadline=None)
@given(data=st.data())
def test_what_was_written_is_read_whoever_shares_it_and_whatever_ends(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_cache, "PAGE_TOKENS", data.draw(st.integers(1, 5)))
        model = Model()
        model.put(None, data.draw(st.integers(1, 9)))
        for _ in range(data.draw(st.integers(1, 25))):
            room = 5 - len(model.slots)
            ways = ["put", "first"]
            ways += ["enter"] * 3 if room and model.kept else []
            ways += [*["step"] * 3, "end"] if model.slots else []
            ways += ["drop"] if model.kept else []
            way = data.draw(st.sampled_from(ways))
            which = data.draw(st.integers(0, max(0, len(model.kept) - 1)))
            if way == "put":
                model.put(
                    which if model.kept and data.draw(st.booleans()) else None, data.draw(st.integers(1, 9))
                )
            elif way == "first" and model.kept:
                model.first(which, data.draw(st.integers(1, model.kept[which][1].shape[3])))
            elif way == "enter":
                model.enter(which, data.draw(st.integers(1, room)))
            elif way == "step":
                model.step()
            elif way == "end":
                slot = data.draw(st.integers(0, len(model.slots) - 1))
                model.end(slot, is_kept=data.draw(st.booleans()))
            elif way == "drop":
                model.kept.pop(which)
            model.check()
        while model.slots:
            model.end(0, is_kept=False)
        model.kept.clear()
        assert model.cache._pages.num_used == 0, "every page came back"


FORMS = {
    "all": AttentionForm(scaling=0.3),
    "window": AttentionForm(scaling=0.3, window=5),
    "chunk": AttentionForm(scaling=0.3, chunk=6),
    "cap": AttentionForm(scaling=0.3, softcap=2.0),
}


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("heads", "dim", "value_dim"), [(2, 8, 8), (2, 8, 6), (1, 5, 7)], ids=str)
def test_attention_over_pages_is_that_over_slots(
    monkeypatch: pytest.MonkeyPatch, form: str, heads: int, dim: int, value_dim: int
) -> None:
    """But for the last digits, where torch attends: a slot is read to its end. Also of layers that do not fill the
    table."""
    monkeypatch.setattr(kernel, "attend", lambda *_: None)
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 7, 8, 13, 4]
    caches = SlotCache(5), PagedCache(5, CPU)
    for slot, length in enumerate(lengths):
        given = torch.randn(2, 1, 2, length, 8, generator=generator)
        for cache in caches:
            computed = cache.put(given, before=None, state_bytes=0)
            assert computed is not None
            assert cache.enter(range(slot, slot + 1), computed, longest=max(lengths)) == 1
    query, key, value = (
        torch.randn(5, count, size, generator=generator)
        for count, size in ((4, dim), (heads, dim), (heads, value_dim))
    )
    outs = []
    for cache in caches:
        assert cache.reserve(np.array(lengths))
        attention = DecodeAttention(cache, torch.tensor(lengths), num_tokens=max(lengths) + 1)
        outs.append(attention.attend(0, query, key, value, FORMS[form]))
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-6)


def asks(count: int) -> list[Ask]:
    """Groups of four of one prompt, of many lengths, some of which end at a stop token."""
    return [
        (
            tokens(2 + 3 * (number // 4 % 5), number // 4),
            sampled(number, 1 + 4 * (number % 6), stop_token_ids=(3,)),
        )
        for number in range(count)
    ]


KINDS = ("qwen3", "gpt2", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_5")


@pytest.mark.usefixtures("in_pages")
@pytest.mark.parametrize("num_pages", [None, 12], ids=["plenty", "short"])
@pytest.mark.parametrize("kind", by_default(KINDS, "qwen3", "deepseek_v3", "qwen3_5"))
def test_answers_in_pages_are_those_in_slots(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, kind: str, num_pages: int | None
) -> None:
    model = tiny(kind, dtype="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "new_cache", lambda device, capacity: SlotCache(capacity))
        wanted = answers(model, asks(24), max_running=9)
    if num_pages is not None:
        of_model = {"gpt2": 2, "deepseek_v3": 4}.get(kind, 1)  # more key heads, and larger ones
        bounded(monkeypatch, of_model * num_pages)
    engine = NativeEngine(model, max_running=9)
    engine._batch._reads_behind = num_pages is not None
    found = run(generate_all(engine, asks(24)))
    assert token_ids(found) == token_ids(wanted)
    for output, other in zip(found, wanted, strict=True):
        # What was put back is computed in another way; with a recurrent state its rounding adds up.
        assert output.log_probs == pytest.approx(other.log_probs, abs=1e-3 if kind == "qwen3_5" else 1e-4)
    if num_pages is not None and kind == "qwen3":
        assert engine._batch.num_preempted > 0
    engine._batch.prefill.forget()
    assert pages_of(engine._batch)._pages.num_used == 0, "every page came back"


@pytest.fixture
def model(tiny: Tiny) -> CausalLM:
    return tiny("qwen3", dtype="float32")


@pytest.mark.usefixtures("in_pages")
def test_a_group_has_its_prompt_once(model: CausalLM) -> None:
    prompt, count = tuple(tokens(34, 1)), 8
    batch = DecodeBatch(model, max_running=count)
    batch.waiting.extend(Request(f"{n}", prompt, sampled(n, 7)) for n in range(count))
    batch.step(0)
    cache = pages_of(batch)
    # 8 full pages of the prompt once, its last two tokens in a page of each; and once more while it may be asked for.
    assert cache._pages.num_used == 8 + 8 + 1
    assert Counter(cache._rows[:count, 8].tolist()).most_common(1)[0][1] == 1, (
        "nobody writes to the page of another"
    )
    for _ in range(4):
        batch.step(0)
    assert [len(request.token_ids) for request in batch.running] == [6] * count
    assert cache.num_bytes == (8 + 2 * 8 + 1) * PAGE_BYTES
    slots = SlotCache(count)
    computed = slots.put(torch.zeros(2, 2, 2, 34, 8), before=None, state_bytes=0)
    assert slots.enter(range(count), computed, longest=0) == count
    assert slots.num_bytes >= 8 * 34 * PAGE_BYTES / PAGE > 2.5 * cache.num_bytes


class Operations(TorchDispatchMode):
    """Names of what torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("in_pages")
def test_a_sequence_that_ends_copies_nothing_and_its_pages_are_free(model: CausalLM) -> None:
    batch = DecodeBatch(model, max_running=4)
    batch.waiting.extend(Request(f"{n}", tuple(tokens(9, n)), sampled(n, 20)) for n in range(4))
    for _ in range(4):
        batch.step(0)
    batch.prefill.forget()
    cache, used = pages_of(batch), pages_of(batch)._pages.num_used
    longest = cache._rows[3, :4].tolist()
    with Operations() as operations:
        batch._release([1])
    assert operations.names == []
    assert used - cache._pages.num_used == 4, "of 13 tokens"
    assert cache._rows[1, :4].tolist() == longest, "the last sequence goes on in its own pages"
    assert cache._rows[3].tolist() == [NOBODYS] * cache._rows.shape[1]


@pytest.mark.usefixtures("in_pages")
def test_pool_and_table_stay_where_they_are(model: CausalLM) -> None:
    """While sequences enter, end, and are put back by new weights: what was captured over them stays valid."""
    batch, seen = DecodeBatch(model, max_running=5), set()
    for prompt, how in asks(30):
        batch.waiting.append(Request(f"{how.key}", tuple(prompt), how))
    steps = 0
    while not batch.is_idle:
        batch.step(0)
        steps += 1
        if batch.running:
            seen.add(pages_of(batch).addresses)
        if steps == 7:
            batch.put_back()
    assert len(seen) == 1
    assert pages_of(batch).num_moves == 0


@pytest.mark.usefixtures("in_pages")
def test_more_than_was_in_sight_moves_to_a_larger_pool_and_changes_nothing(model: CausalLM) -> None:
    later = [(tokens(3, 10 + n), sampled(10 + n, 30)) for n in range(6)]
    alone = answers(model, [(tokens(4, 9), sampled(9, 40))])[0]
    wanted = [answers(model, [ask])[0] for ask in later]

    async def body() -> None:
        engine = NativeEngine(model, max_running=8)
        first = asyncio.create_task(engine.generate("first", tokens(4, 9), sampled(9, 40)))
        await turns(8)
        outputs = await generate_all(engine, later)
        assert token_ids(outputs) == token_ids(wanted)
        assert (await first).token_ids == alone.token_ids
        assert pages_of(engine._batch).num_moves > 0

    run(body())


@pytest.mark.usefixtures("in_pages")
def test_what_only_later_requests_could_use_goes_before_anybody_waits(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [(tokens(11, n), sampled(n, 6)) for n in range(30)]
    wanted = answers(model, given, max_running=30)
    bounded(monkeypatch, 18)
    engine = NativeEngine(model, max_running=3)
    assert token_ids(run(generate_all(engine, given))) == token_ids(wanted)
    assert engine._batch.num_preempted == 0
    assert engine._batch.prefill.num_bytes > 0, "the others are kept"
    assert engine._batch.cache_bytes <= 18 * PAGE_BYTES


@pytest.mark.usefixtures("in_pages")
def test_a_turn_goes_on_in_the_pages_of_the_one_before(model: CausalLM) -> None:
    turn = answers(model, [(tokens(8, 3), sampled(0, 9))])[0]
    prompt = [*tokens(8, 3), *turn.token_ids, *tokens(4, 11)]
    wanted = answers(model, [(prompt, sampled(1, 6))])[0]

    async def body() -> None:
        engine = NativeEngine(model, max_running=4)
        await engine.generate("0", tokens(8, 3), sampled(0, 9))
        await engine.generate("0, goes on", prompt, sampled(1, 1))
        await engine.flush_cache()
        assert pages_of(engine._batch)._pages.num_used == 0
        before = engine._batch.prefill.num_reused
        await engine.generate("1", tokens(8, 3), sampled(0, 9))
        cache = pages_of(engine._batch)
        assert cache._pages.num_used == 4, "the prompt's full pages are those of the sequence that ended"
        second = await engine.generate("2", prompt, sampled(1, 6))
        assert engine._batch.prefill.num_reused - before == 16
        assert second.token_ids == wanted.token_ids
        assert second.log_probs == pytest.approx(wanted.log_probs, abs=1e-5)

    run(body())


@pytest.mark.usefixtures("in_pages")
@pytest.mark.parametrize("num_pages", [7, pytest.param(9, marks=pytest.mark.slow), 30])
def test_a_prompt_in_pieces_gets_through_beside_others(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, num_pages: int
) -> None:
    given = [(tokens(20, 1), sampled(0, 4)), *((tokens(5, n), sampled(n, 9)) for n in range(2, 7))]
    wanted = [answers(model, [ask])[0] for ask in given]
    monkeypatch.setattr("strop.rollout.native.prefill.PREFILL_TOKENS", 6)
    bounded(monkeypatch, num_pages)
    engine = NativeEngine(model, max_running=4)
    assert token_ids(run(generate_all(engine, given))) == token_ids(wanted)
    assert len(pages_of(engine._batch)._pages) <= num_pages


@pytest.mark.usefixtures("in_pages")
def test_a_sequence_without_room_ends_with_a_sentence_and_the_next_one_runs(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded(monkeypatch, 5)  # one is nobody's

    async def body() -> None:
        engine = NativeEngine(model, max_running=4)
        with pytest.raises(
            MemoryError, match="one sequence of 1[0-9] tokens: lower data.max_response_tokens"
        ):
            await engine.generate("long", tokens(8, 3), sampled(0, 30))
        assert len((await engine.generate("short", tokens(5, 3), sampled(0, 4))).token_ids) == 4

    run(body())


@pytest.mark.usefixtures("in_pages")
def test_memory_that_is_free_in_pieces_ends_a_batch_with_a_sentence(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_cache, "zeros", lambda shape, like: None)
    batch = DecodeBatch(model, max_running=4)
    batch.waiting.append(Request("0", tuple(tokens(8, 3)), sampled(0, 8)))
    with pytest.raises(MemoryError, match="one sequence of 8 tokens"):
        steps(batch, 3)


@pytest.mark.usefixtures("in_pages")
def test_what_waiting_prompts_hold_goes_before_a_sequence_that_runs(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first one grows to 31 tokens, all 8 pages, while the other's 20 are computed two in a step: when its third
    # page is taken, the other one has no room any more, and still holds what it began with.
    given = [(tokens(4, 1), sampled(0, 28)), (tokens(20, 2), sampled(1, 2))]
    wanted = [answers(model, [ask])[0] for ask in given]
    monkeypatch.setattr("strop.rollout.native.prefill.PREFILL_TOKENS", 2)
    bounded(monkeypatch, 9)
    engine = NativeEngine(model, max_running=4)
    assert token_ids(run(generate_all(engine, given))) == token_ids(wanted)
    assert engine._batch.num_preempted == 0
    assert engine._batch.prefill.num_computed > 4 + 20, "the other one was computed again"


@pytest.mark.usefixtures("small_pages")
def test_a_piece_without_a_page_keeps_those_before_it(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.rollout.native.prefill.PREFILL_TOKENS", 6)
    bounded(monkeypatch, 8)
    cache = PagedCache(4, CPU)
    prefill, request = Prefill(model, cache), Request("0", tuple(tokens(12, 1)), sampled(0, 20))
    cache.expect([request])  # the pool is as large as it may get
    prefill.compute([request])
    others = cache.put(torch.zeros(2, 2, 2, 5 * PAGE, 8), before=None, state_bytes=0)
    assert others is not None, "with two of the first piece all seven"
    prefill.compute([request])
    assert (prefill.num_computed, prefill.num_computed_of(request)) == (6, 6)
    assert prefill.get(request) is None
    del others
    prefill.compute([request])
    assert prefill.get(request) is not None
    assert (prefill.num_computed, prefill.num_reused) == (12, 0)


@pytest.mark.usefixtures("in_pages")
@pytest.mark.parametrize(("most", "together"), [(1000, 4), (45, 2), (5, 1)])
def test_beginnings_that_are_copied_together_are_bounded(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, most: int, together: int
) -> None:
    """Turns of four conversations, each behind 20 tokens or so, which come at one time."""
    monkeypatch.setattr("strop.rollout.native.prefill.DEVICE_PREFIX_TOKENS", most)
    compute, sizes = Prefill._compute, []

    def noted(prefill: Prefill, pieces: Sequence[Any]) -> None:
        sizes.append(sum(piece.prefix is not None for piece in pieces))
        compute(prefill, pieces)

    monkeypatch.setattr(Prefill, "_compute", noted)

    async def body() -> tuple[list[list[int]], list[tuple[int, ...]]]:
        engine = NativeEngine(model, max_running=8)

        async def answered(name: str, given: list[list[int]], count: int) -> list[tuple[int, ...]]:
            asked = (engine.generate(f"{name}{n}", ids, sampled(n, count)) for n, ids in enumerate(given))
            return [output.token_ids for output in await asyncio.gather(*asked)]

        given = [tokens(12, number) for number in range(5)]
        given = [[*ids, *said] for ids, said in zip(given, await answered("a", given, 9), strict=True)]
        await answered("b", [[*given[4], 3]], 1)  # from now on sequences that end are kept
        await answered("c", given[:4], 2)
        sizes.clear()
        later = [[*ids, 3, 4] for ids in given[:4]]
        return later, await answered("d", later, 5)

    later, found = run(body())
    assert max(sizes) == together
    assert found == token_ids(answers(model, [(ids, sampled(n, 5)) for n, ids in enumerate(later)]))


@pytest.mark.usefixtures("in_pages")
def test_the_beginning_of_a_turn_counts_as_computed_before_it_is_given_up(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = answers(model, [(tokens(8, 3), sampled(0, 9))])[0]
    prompt = [*tokens(8, 3), *turn.token_ids, *tokens(4, 11)]
    wanted = answers(model, [(prompt, sampled(1, 3))])[0]
    # Beside four pages that are kept, the turn's 21 tokens take two and one to go on in.
    bounded(monkeypatch, 1 + 4 + 3)

    async def body() -> None:
        engine = NativeEngine(model, max_running=4)
        await engine.generate("0", tokens(8, 3), sampled(0, 9))
        await engine.generate("0, goes on", prompt, sampled(1, 1))
        await engine.flush_cache()
        await engine.generate("1", tokens(8, 3), sampled(0, 9))
        before = engine._batch.prefill.num_reused
        second = await engine.generate("2", prompt, sampled(1, 3))
        assert engine._batch.prefill.num_reused - before == 16
        assert second.token_ids == wanted.token_ids

    run(body())


@pytest.mark.usefixtures("in_pages")
def test_new_weights_in_flight_and_a_sleep_change_nothing(model: CausalLM) -> None:
    given = asks(8)
    wanted = answers(model, given, max_running=4)

    async def body() -> None:
        engine = NativeEngine(model, max_running=4)
        started = [
            asyncio.create_task(engine.generate(f"{n}", prompt, how)) for n, (prompt, how) in enumerate(given)
        ]
        await turns(9)
        await engine.set_version(1)  # the same numbers
        await turns(4)
        await engine.pause()
        await engine.sleep()
        assert (await engine.health())["cache_bytes"] == 0 == pages_of(engine._batch).held_bytes
        await engine.resume()
        assert token_ids(await asyncio.gather(*started)) == token_ids(wanted)

    run(body())


class TestRoom:
    """The size of the pool, on a device that computes nothing."""

    def cache(self, monkeypatch: pytest.MonkeyPatch, num_pages: int) -> PagedCache:
        bounded(monkeypatch, num_pages)
        monkeypatch.setattr(paged_cache, "PAGE_TOKENS", PAGE)
        return PagedCache(64, torch.device("meta"))

    def requests(self) -> list[Request]:
        """Two groups of three: prompts of 10 tokens, answers of 9."""
        return [Request(f"{n}", tuple(tokens(10, n // 3)), sampled(n, 9)) for n in range(6)]

    def begin(self, cache: PagedCache) -> Computed | None:
        return cache.put(torch.empty(2, 2, 2, 10, 8, device="meta"), before=None, state_bytes=0)

    def test_all_that_is_in_sight(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = self.cache(monkeypatch, 1000)
        cache.expect(self.requests())
        assert self.begin(cache) is not None
        # Nobody's; three pages of each prompt; of each sequence the three from its last tokens of the prompt on.
        assert cache.pool.shape[2] == 1 + 2 * 3 + 6 * 3
        assert cache.held_bytes == 25 * PAGE_BYTES

    def test_with_less_memory_all_of_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = self.cache(monkeypatch, 11)
        cache.expect(self.requests())
        assert self.begin(cache) is not None
        assert cache.pool.shape[2] == 11

    def test_states_take_their_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = self.cache(monkeypatch, 40)
        free = 40 * PAGE_BYTES / paged_cache.POOL_SHARE + 1
        monkeypatch.setattr(PagedCache, "_free_bytes", free)
        cache.expect(self.requests())
        given = torch.empty(2, 2, 2, 10, 8, device="meta")
        assert cache.put(given, before=None, state_bytes=5 * PAGE_BYTES) is not None
        assert cache.pool.shape[2] == 10

    @pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), DRIVER_ERROR])
    @pytest.mark.parametrize(("largest", "size"), [(12, 12), (6, 6), (3, None)])
    def test_memory_in_pieces(
        self, monkeypatch: pytest.MonkeyPatch, largest: int, size: int | None, error: RuntimeError
    ) -> None:
        cache = self.cache(monkeypatch, 1000)
        cache.expect(self.requests())
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
        make = torch.Tensor.new_zeros

        def pieces(like: Tensor, *shape: object) -> Tensor:
            sizes = shape[0] if isinstance(shape[0], tuple) else shape
            if sizes[2] > largest:  # type: ignore[index]
                raise error
            return make(like, *shape)  # type: ignore[arg-type]

        monkeypatch.setattr(torch.Tensor, "new_zeros", pieces)
        assert (self.begin(cache) is None) == (size is None)
        assert cache.pool.shape[2] == (size or 0)

    def test_a_second_pool_in_a_step_takes_what_the_first_one_left(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(paged_cache, "PAGE_TOKENS", PAGE)
        cache = PagedCache(64, torch.device("meta"))
        cache.free_bytes = 30 * PAGE_BYTES
        held = [self.begin(cache)]
        while held[-1] is not None:
            held.append(self.begin(cache))
            assert cache.free_bytes + cache.held_bytes == 30 * PAGE_BYTES
        # Pools of 4, 7, 10 and 15 pages, each beside the one before; 16 are more than 80 % of the 15 that are left.
        assert cache.pool.shape[2] == 15
        cache.free()
        assert cache.free_bytes == 30 * PAGE_BYTES

    def test_ranks_have_pools_of_one_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another rank has memory for 24 pages, but only in pieces of less than 7."""
        cache, numbers = self.cache(monkeypatch, 1000), []
        others = iter([24, 0, 0, 1])

        def agreed(number: int) -> int:
            numbers.append(number)
            return min(number, next(others))

        cache.agreed = agreed
        cache.expect(self.requests())
        assert self.begin(cache) is not None
        assert numbers == [25, 1, 1, 1], "this rank had room each time"
        assert cache.pool.shape[2] == 6

    def test_most_memory_so_far_stays_known_in_another_pool(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = self.cache(monkeypatch, 1000)
        self.begin(cache)  # of nobody: free again
        assert cache.num_bytes == 3 * PAGE_BYTES
        cache.expect(self.requests())
        assert cache.pool.shape[2] == 25
        assert cache.num_bytes == 3 * PAGE_BYTES

    def test_a_batch_takes_no_more_than_fits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cache, given = self.cache(monkeypatch, 11), self.requests()
        none = np.zeros(0, dtype=np.int64)
        assert cache.num_fitting([Entrant(one, 0) for one in given], none) == 6, "its form is not known"
        cache.expect(given)
        self.begin(cache)  # of nobody: free again
        # 10 pages: three of a prompt and one of each of its sequences, twice, would be 12.
        assert cache.num_fitting([Entrant(one, 0) for one in given], none) == 4
        # What is computed lies in pages already: of a whole prompt the last one is copied.
        assert cache.num_fitting([Entrant(one, 10) for one in given], none) == 6
