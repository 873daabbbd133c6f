"""A store for torch.distributed that only the processes of a run can use."""

from __future__ import annotations

import datetime
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from references.rank_processes import Ranks, run_ranks
from strop.controller.store_server import RendezvousServer, RendezvousStore
from strop.utils.network_interfaces import interface_of

DEADLINE_S = 20.0


@pytest.fixture
def place() -> Iterator[RendezvousServer]:
    one = RendezvousServer("127.0.0.1")
    yield one
    one.close()


@pytest.fixture
def store(place: RendezvousServer) -> Iterator[RendezvousStore]:
    one = RendezvousStore(place.rendezvous, timeout_s=DEADLINE_S)
    yield one
    one.close()


def test_it_does_what_torchs_own_stores_do(store: RendezvousStore) -> None:
    own = dist.HashStore()
    for one in (store, own):
        one.set("a", b"\0\xff" if one is store else "x")
        one.set("text", "words")
        assert one.get("text") == b"words"
        assert one.add("n", 3) == 3
        assert one.add("n", -1) == 2
        assert one.get("n") == b"2"
        assert one.check(["a", "n"])
        assert not one.check(["a", "absent"])
        assert one.compare_set("text", "wrong", "new") == b"words"
        assert one.compare_set("text", "words", "new") == b"new"
        assert one.compare_set("fresh", "", "first") == b"first"
        assert one.num_keys() == 4
        assert one.delete_key("a")
        assert not one.delete_key("a")
    store.set("a", b"\0\xff")
    assert store.get("a") == b"\0\xff"


def test_a_group_may_take_one_more_for_its_own_threads(store: RendezvousStore) -> None:
    prefixed = dist.PrefixStore("group", store)  # type: ignore[attr-defined]
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(prefixed.clone().get("key")))
    prefixed.set("key", b"here")
    thread.start()
    thread.join(DEADLINE_S)
    assert found == [b"here"]
    assert store.get("group/key") == b"here"


def test_a_wait_ends_when_another_process_sets_the_key(
    store: RendezvousStore, place: RendezvousServer
) -> None:
    other = RendezvousStore(place.rendezvous, timeout_s=DEADLINE_S)
    thread = threading.Timer(0.05, other.set, ("late", b"here"))
    thread.start()
    store.wait(["late"])
    assert store.get("late") == b"here"
    thread.join()
    other.close()


def test_a_wait_ends_at_its_deadline_and_says_for_what(store: RendezvousStore) -> None:
    with pytest.raises(
        dist.DistStoreError, match="waited 0.05 s at the rendezvous for absent, which another"
    ):
        store.wait(["absent"], datetime.timedelta(seconds=0.05))
    assert store.add("n", 1) == 1, "the connection is good for more"


def test_threads_of_torch_look_while_another_one_waits(store: RendezvousStore) -> None:
    waiting = threading.Thread(target=store.wait, args=(["late"],))
    waiting.start()
    assert not store.check(["late"])
    store.set("late", b"")
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()


def test_another_process_can_neither_list_nor_delete_keys(
    place: RendezvousServer, store: RendezvousStore
) -> None:
    """What another user did with the keys of a TCPStore, tried with torch's own client and with a wrong secret."""
    store.set("key", b"value")
    with pytest.raises((RuntimeError, OSError)):
        TCPStore("127.0.0.1", place.rendezvous.port, is_master=False, timeout=datetime.timedelta(seconds=0.3))
    with pytest.raises(ConnectionError, match="cannot be reached"):
        RendezvousStore(replace(place.rendezvous, secret="5e" * 32), timeout_s=0.2)
    assert store.get("key") == b"value"


def is_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_message_of_a_process_of_the_run_is_bounded_and_bad_ones_are_answered(
    place: RendezvousServer, store: RendezvousStore
) -> None:
    with pytest.raises(RuntimeError, match="the request cannot be read: KeyError"):
        store._ask("set", ["key"])
    with pytest.raises(RuntimeError, match="cannot be read: ValueError"):
        store._ask("dance", [])
    connection = store._messages().connection
    connection.sendall(b"\xff" * 8)
    assert is_ended(connection), "a length that is none of ours"
    other = RendezvousStore(place.rendezvous, timeout_s=DEADLINE_S)
    deep = b"[" * 100_000
    other._messages().connection.sendall(len(deep).to_bytes(4, "big") + deep)
    assert is_ended(other._messages().connection)


def test_the_secret_is_in_no_text(place: RendezvousServer) -> None:
    assert place.rendezvous.secret not in repr(place.rendezvous)


def listeners_during(ranks: Ranks) -> list[tuple[str, int]]:
    ranks.join(sequence_parallel=2)
    dist.all_reduce(torch.ones(1))
    own = psutil.Process().net_connections("tcp")
    return [(c.laddr.ip, c.laddr.port) for c in own if c.status == psutil.CONN_LISTEN]


def test_a_group_of_two_processes_listens_on_loopback_only() -> None:
    seen = run_ranks(listeners_during, 2)
    assert all(seen), "gloo listens"
    assert {address for one in seen for address, _ in one} == {"127.0.0.1"}


def test_what_a_group_leaves_behind_is_not_taken_for_the_addresses_of_the_next(
    place: RendezvousServer,
) -> None:
    first, second = (place.rendezvous.join(timeout_s=DEADLINE_S) for _ in range(2))
    first.set("rank 0", "an address that is gone")
    assert not second.check(["rank 0"])
    with pytest.raises(dist.DistStoreError, match="at the rendezvous for rank 0, which"):
        second.wait(["rank 0"], datetime.timedelta(seconds=0.01))
    first.close()
    second.close()


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.1.2.3") == "lo"
    assert interface_of("203.0.113.7") == ""
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family == socket.AF_INET and name != "lo":
                assert interface_of(one.address) == name
