"""Who comes in at a gate, and what strangers can do there: nothing."""

from __future__ import annotations

import hmac
import logging
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from strop.controller import auth_listener as gates
from strop.controller.auth_listener import (
    HANDSHAKE_S,
    MAX_PENDING,
    AuthenticationRefused,
    AuthListener,
    connect_authenticated,
    new_secret,
)

PURPOSE = "test"
DEADLINE_S = 20.0


class Door:
    """A gate and those that it let in."""

    def __init__(self) -> None:
        self.secret = new_secret()
        self.came: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self.gate = AuthListener("127.0.0.1", self.secret, purpose=PURPOSE, welcome=self.came.put)

    def knock(self, secret: str = "", timeout_s: float = DEADLINE_S) -> socket.socket:
        return connect_authenticated(
            "127.0.0.1", self.gate.port, secret or self.secret, purpose=PURPOSE, timeout_s=timeout_s
        )

    def stranger(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.gate.port), timeout=DEADLINE_S)

    def lets_in_who_knows(self) -> bool:
        theirs = self.knock()
        ours = self.came.get(timeout=DEADLINE_S)
        theirs.sendall(b"hello")
        heard = ours.recv(5)
        theirs.close()
        ours.close()
        return heard == b"hello"


@pytest.fixture
def door() -> Iterator[Door]:
    one = Door()
    yield one
    one.gate.close()


def is_cut_off(connection: socket.socket) -> bool:
    """Whether the other side closes the connection, after its challenge."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_who_knows_the_secret_comes_in_and_nothing_precedes_the_messages(door: Door) -> None:
    assert door.lets_in_who_knows()
    assert door.lets_in_who_knows()


@pytest.mark.parametrize(
    "said",
    [
        pytest.param((4096).to_bytes(4, "big") + b"[" * 4096, id="a frame of brackets"),
        pytest.param(b"\xff" * 64, id="an endless length"),
        pytest.param(b"\x80\x04\x95" + b"\0" * 61, id="a pickle"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".ljust(64), id="a browser"),
    ],
)
def test_noise_is_cut_off_and_told_in_one_line_without_its_words(
    door: Door, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    noise = door.stranger()
    noise.sendall(said)
    assert is_cut_off(noise)
    assert door.lets_in_who_knows()
    (line,) = caplog.messages
    assert line == "1 connection was turned away at the test (it does not know the secret)"


def test_a_thousand_strangers_are_one_line(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(200):
        one = door.stranger()
        one.sendall(b"[" * 64)
        one.close()
    assert door.lets_in_who_knows()
    assert len(caplog.messages) == 1


def test_a_wrong_key_in_the_right_format_does_not_open(door: Door) -> None:
    # The gate closes the connection, and the client tries again, in case it was crowded out, until its deadline.
    with pytest.raises(OSError, match=r"turned us away|did not prove itself in time|timed out"):
        door.knock(new_secret(), timeout_s=0.2)
    assert door.came.empty()


def test_a_conversation_that_was_overheard_opens_nothing(door: Door) -> None:
    stranger = door.stranger()
    challenge = stranger.recv(32)
    nonce = b"n" * 32
    proof = gates._proof(door.secret, "client", PURPOSE, challenge, nonce)
    stranger.sendall(nonce + proof)
    assert len(stranger.recv(32)) == 32, "this is the right conversation"
    door.came.get(timeout=DEADLINE_S)
    again = door.stranger()
    again.recv(32)
    again.sendall(nonce + proof)
    assert is_cut_off(again)
    assert door.came.empty()


def test_the_gates_own_proof_sent_back_opens_nothing(door: Door) -> None:
    """The two sides prove different things, so a client cannot let the server do its sums."""
    stranger = door.stranger()
    challenge = stranger.recv(32)
    mirrored = hmac.digest(door.secret.encode(), b"strop server\0test\0" + challenge + challenge, "sha256")
    stranger.sendall(challenge + mirrored)
    assert is_cut_off(stranger)


def test_the_purpose_belongs_to_the_proof(door: Door) -> None:
    with pytest.raises(OSError, match=r"turned us away|in time|timed out"):
        connect_authenticated("127.0.0.1", door.gate.port, door.secret, purpose="another", timeout_s=0.2)


def test_half_open_and_slow_connections_hold_nobody_up(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = [door.stranger() for _ in range(MAX_PENDING + 10)]
    slow[-1].sendall(b"x")
    for _ in range(3):
        assert door.lets_in_who_knows()
    # No more are held than the limit says, whoever comes first goes first.
    assert all(is_cut_off(one) for one in slow[:10])
    assert len(door.gate._pending) <= MAX_PENDING
    assert re.match(
        r"\d+ connections? (was|were) turned away at the test \(too many came at once\)",
        caplog.text[caplog.text.index("1 conn") :],
    )


def test_who_is_slow_to_answer_outlives_two_hundred_strangers(door: Door) -> None:
    """While they flood the port, the processor is theirs too."""
    slow = door.stranger()
    challenge = slow.recv(32)
    crowd = [door.stranger() for _ in range(200)]
    until(lambda: len(door.gate._pending) == 201)
    slow.sendall(b"n" * 32 + gates._proof(door.secret, "client", PURPOSE, challenge, b"n" * 32))
    door.came.get(timeout=DEADLINE_S).close()
    for one in crowd:
        one.close()


def test_a_connection_that_is_lost_in_the_queue_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system takes more connections than a crowded queue has room for, and forgets some of them."""
    monkeypatch.setattr(gates, "HANDSHAKE_S", 0.05)
    secret = new_secret()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def play() -> None:
            forgotten, _ = listener.accept()
            heard, _ = listener.accept()
            heard.sendall(b"c" * 32)
            nonce = heard.recv(64)[:32]
            heard.sendall(gates._proof(secret, "server", PURPOSE, b"c" * 32, nonce))
            heard.recv(1)
            forgotten.close()

        thread = threading.Thread(target=play, daemon=True)
        thread.start()
        where = listener.getsockname()
        connect_authenticated(*where, secret, purpose=PURPOSE, timeout_s=DEADLINE_S).close()
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "the second connection was the one that was heard"


def test_a_connection_that_proves_nothing_in_time_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "HANDSHAKE_S", 0.05)
    monkeypatch.setattr(gates, "_CHECK_S", 0.02)
    door = Door()
    slow = door.stranger()
    slow.sendall(b"x")
    assert is_cut_off(slow)
    door.gate.close()
    assert HANDSHAKE_S < 30, "a bound that a person would wait for"


def test_whoever_took_the_port_of_a_gate_learns_nothing_and_is_not_believed() -> None:
    secret = new_secret()
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def play() -> None:
            connection, _ = listener.accept()
            connection.sendall(b"c" * 32)
            heard.append(connection.recv(64))
            connection.sendall(b"p" * 32)
            connection.recv(1)

        thread = threading.Thread(target=play, daemon=True)
        thread.start()
        with pytest.raises(AuthenticationRefused, match="does not know the secret of this run"):
            connect_authenticated(
                "127.0.0.1", listener.getsockname()[1], secret, purpose=PURPOSE, timeout_s=DEADLINE_S
            )
        thread.join(DEADLINE_S)
    assert secret.encode() not in heard[0]
    assert bytes.fromhex(secret) not in heard[0]


def test_a_closed_gate_listens_no_more() -> None:
    door = Door()
    stranger = door.stranger()
    door.gate.close()
    door.gate.close()
    assert is_cut_off(stranger)
    with pytest.raises(OSError, match="refused"):
        door.stranger()


def test_the_log_is_bounded_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    complaints = gates._RefusalLog("x")
    monkeypatch.setattr(gates, "QUIET_S", 0.0)
    with caplog.at_level(logging.WARNING):
        complaints.add("a")
        monkeypatch.setattr(gates, "QUIET_S", 60.0)
        for _ in range(3):
            complaints.add("b")
    assert caplog.messages == [
        "1 connection was turned away at the x (a)",
        "1 connection was turned away at the x (b)",
    ]


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
def test_it_is_bound_to_the_address_that_it_was_given(host: str) -> None:
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    secret = new_secret()
    gate = AuthListener(host, secret, purpose=PURPOSE, welcome=socket.socket.close)
    connect_authenticated(host, gate.port, secret, purpose=PURPOSE, timeout_s=DEADLINE_S).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", gate.port), timeout=DEADLINE_S)
    gate.close()
