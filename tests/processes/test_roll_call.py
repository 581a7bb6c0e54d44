"""Processes find each other, or learn who is missing. Threads stand for them: nothing here needs JAX."""

import socket
import threading
import time

import pytest

from jaxshard.processes.roll_call import roll_call


@pytest.fixture
def address(monkeypatch):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        found = f"127.0.0.1:{s.getsockname()[1]}"
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", found)
    return found


def outcomes(address, calls, seconds=20.0):
    """What each call `(count, rank)` ends with: None, or its error."""
    found = [None] * len(calls)

    def call(i, count, rank):
        try:
            roll_call(address, count, rank, seconds)
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=call, args=(i, *given)) for i, given in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_are_there(address):
    for _ in range(3):  # the port is free again each time
        assert outcomes(address, [(4, 3), (4, 0), (4, 1), (4, 2)]) == [None] * 4
    with socket.create_server(("127.0.0.1", int(address.split(":")[1]))):
        pass


def test_who_is_missing_is_told_to_all_who_came(address):
    """F25."""
    for error in outcomes(address, [(4, 0), (4, 2)], seconds=1.5):
        assert isinstance(error, TimeoutError)
        assert f"process 1, 3 of 4 did not come to {address} within 1.5 s" in str(error)


def test_without_process_0(address):
    (error,) = outcomes(address, [(2, 1)], seconds=0.5)
    assert isinstance(error, TimeoutError)
    assert f"process 1 of 2 found no process 0 at {address} within 0.5 s" in str(error)


def test_the_port_is_taken(address):
    with socket.create_server(("127.0.0.1", int(address.split(":")[1]))):
        (error,) = outcomes(address, [(2, 0)])
    assert isinstance(error, OSError)
    assert f"process 0 cannot listen at {address}" in str(error)


def test_processes_that_disagree(address):
    for error in outcomes(address, [(2, 0), (3, 1)]):
        assert isinstance(error, ValueError)
        assert "process 1 says that there are 3 processes, 0 says 2" in str(error)
    for error in outcomes(address, [(3, 0), (3, 1), (3, 1)]):
        assert isinstance(error, ValueError)
        assert "two processes say that they are process 1 of 3" in str(error)


def test_a_process_whose_call_was_cut_off_calls_again(address):
    def cut_off():
        host, port = address.split(":")
        while True:
            try:
                with socket.create_connection((host, int(port)), timeout=5) as connection:
                    connection.sendall(b"jaxshard 1 3\n")
                    return
            except ConnectionRefusedError:
                time.sleep(0.01)

    first = threading.Thread(target=lambda: found.append(outcomes(address, [(3, 0)])))
    found = []
    first.start()
    cut_off()
    time.sleep(0.1)
    assert outcomes(address, [(3, 1), (3, 2)]) == [None, None]
    first.join()
    assert found == [[None]]


def test_strangers_are_sent_away(address):
    """A port scanner does not count as a process."""
    host, port = address.split(":")

    def stranger():
        for _ in range(100):
            try:
                with socket.create_connection((host, int(port)), timeout=5) as s:
                    s.sendall(b"GET / HTTP/1.0\r\n\r\n")
                    s.recv(10)
                return
            except OSError:
                continue

    thread = threading.Thread(target=stranger)
    thread.start()
    found = outcomes(address, [(2, 0), (2, 1)])
    thread.join()
    assert found == [None, None]


def test_a_coordinator_that_asks_nobody_is_left_to_jax(address):
    """Process 0 joined by jax.distributed alone."""
    with socket.create_server(("127.0.0.1", int(address.split(":")[1]))) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"PRI * HTTP/2.0\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert outcomes(address, [(2, 1)]) == [None]
        thread.join()
