"""Processes find each other, or learn who is missing. Threads stand for them: nothing here needs JAX."""

import contextlib
import random
import socket
import subprocess
import sys
import threading
import time

import pytest
from clock import at_most
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshard.processes import lines
from jaxshard.processes.lines import Call
from jaxshard.processes.start import roll_call


@pytest.fixture
def address(monkeypatch):
    for name in ("JAXSHARD_RUN_ID", "SLURM_JOB_ID", "SKYPILOT_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
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
        assert f"process 1, 3 of 4 did not connect to {address} within 1.5 s" in str(error)


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
        assert "process 1 was started with num_processes 3, process 0 with 2" in str(error)
    for error in outcomes(address, [(3, 0), (3, 1), (3, 1)]):
        assert isinstance(error, ValueError)
        assert "two processes have the process_id 1 of 3" in str(error)


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


# Whoever else calls process 0.


@contextlib.contextmanager
def process_0(address, count=2, seconds=3.0):
    """Process 0 waits in a thread; yields what it ends with, [error or None, seconds], once it has ended."""
    ended = []

    def listen():
        start = time.monotonic()
        ended.extend([*outcomes(address, [(count, 0)], seconds), time.monotonic() - start])

    thread = threading.Thread(target=listen)
    thread.start()
    connected(address).close()  # it listens
    yield ended
    thread.join()


def connected(address):
    host, port = address.split(":")
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((host, int(port)), timeout=5)
        time.sleep(0.01)


def closed_by_the_other(connection):
    """Whether process 0 closes; with bytes on their way it does so by a reset."""
    connection.settimeout(10)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_silent_callers_take_no_time(address):
    """Ten of them made process 0 give up after 50 s, though its limit was 6 s, and they kept process 1 waiting."""
    with contextlib.ExitStack() as silent, process_0(address) as ended:
        for _ in range(10):
            silent.enter_context(connected(address))
    assert isinstance(ended[0], TimeoutError)
    assert ended[1] < 4
    with contextlib.ExitStack() as silent, process_0(address, seconds=20) as ended:
        for _ in range(10):
            silent.enter_context(connected(address))
        assert outcomes(address, [(2, 1)]) == [None]
    assert ended[0] is None
    assert ended[1] < 4


def test_slow_callers_are_sent_away(address, monkeypatch):
    monkeypatch.setattr("jaxshard.processes.listening._CALL_SECONDS", 0.5)
    with process_0(address) as ended, connected(address) as slow, at_most(2):
        with contextlib.suppress(OSError):
            for byte in b"jaxshard 1 2\n":
                slow.sendall(bytes([byte]))
                time.sleep(0.1)
        assert closed_by_the_other(slow)
    assert "process 1 of 2 did not connect" in str(ended[0])


@pytest.mark.parametrize("words", ["99 2", "0 2", "2 2", "-1 2", "1 2 3", "1", "", "1 2.0", "\u0661 2", f"1 {9**99}"])
def test_who_cannot_be_one_of_the_processes_is_not_counted(address, words):
    """`jaxshard 99 2` made process 0 say "go" without process 1."""
    with process_0(address, seconds=0.5) as ended, connected(address) as stranger:
        stranger.sendall(f"jaxshard {words}\n".encode())
        assert closed_by_the_other(stranger)
    assert isinstance(ended[0], TimeoutError)


def test_endless_calls_are_cut_off(address):
    """400 MB without the end of a line were taken in."""
    with process_0(address, seconds=1) as ended, connected(address) as endless:
        num_bytes = 0
        with contextlib.suppress(OSError):
            while num_bytes < 400e6:
                num_bytes += endless.send(b"jaxshard 1 " + b"2" * 2**16)
        assert num_bytes < 20e6  # what lies in the buffers of the system
    assert isinstance(ended[0], TimeoutError)


def test_a_flood_of_callers_keeps_nobody_out(address):
    with contextlib.ExitStack() as silent, process_0(address, seconds=20) as ended:
        for _ in range(300):
            silent.enter_context(connected(address))
        assert outcomes(address, [(2, 1)]) == [None]
    assert ended[0] is None


def test_nor_does_it_where_process_0_may_open_few_files(address):
    code = f"from jaxshard.processes.start import roll_call; roll_call({address!r}, 2, 0, 60.0)"
    command = ["sh", "-c", 'ulimit -n 40; exec "$@"', "sh", sys.executable, "-c", code]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process, contextlib.ExitStack() as silent:
        for _ in range(100):
            silent.enter_context(connected(address))
        assert outcomes(address, [(2, 1)]) == [None]
        assert (process.wait(20), process.stderr.read()) == (0, b"")


def test_only_who_knows_the_id_of_the_run_is_counted(address, monkeypatch):
    monkeypatch.setenv("JAXSHARD_RUN_ID", "mine")
    assert outcomes(address, [(3, 0), (3, 1), (3, 2)]) == [None] * 3
    for words in (b"jaxshard 1 2\n", lines.call_line(Call(1, 2), "theirs"), b"jaxshard 1 2 mine\n"):
        with process_0(address, seconds=0.5) as ended, connected(address) as stranger:
            stranger.sendall(words)
            assert closed_by_the_other(stranger)
        assert "JAXSHARD_RUN_ID must be the same for all" in str(ended[0])


def test_a_process_without_the_id_is_told_why_it_finds_nobody(address, monkeypatch):
    monkeypatch.setattr(lines, "run_id", lambda: "mine")  # of process 0, when it begins
    with process_0(address, seconds=2) as ended:
        monkeypatch.setattr(lines, "run_id", lambda: "")
        (error,) = outcomes(address, [(2, 1)], seconds=1.0)
    assert "found no process 0" in str(error)
    assert "JAXSHARD_RUN_ID must be the same for all" in str(error)
    assert "JAXSHARD_RUN_ID must be the same for all" in str(ended[0])


def test_the_id_of_the_run_comes_from_the_job_and_never_goes_over_the_network():
    assert lines.run_id({"SLURM_JOB_ID": "7", "JAXSHARD_RUN_ID": "mine"}) == "mine"
    assert lines.run_id({"SLURM_JOB_ID": "7", "JAXSHARD_RUN_ID": ""}) == "7"
    assert lines.run_id({"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2"}) == ""
    assert lines.run_id({}) == ""
    for line in (lines.call_line(Call(1, 2), "secret"), lines.answer_line("go", "secret")):
        assert b"secret" not in line


# Whoever else is where process 0 should be.


@contextlib.contextmanager
def in_its_place(address, answer):
    """A server that `answer`s each connection."""
    host, port = address.split(":")
    with socket.create_server((host, int(port))) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    threading.Thread(target=attend, args=(connection,), daemon=True).start()

        def attend(connection):
            with contextlib.suppress(OSError), connection:
                answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


def slowly(connection):
    for byte in b"jaxshard " + b"x" * 1000:
        connection.sendall(bytes([byte]))
        time.sleep(0.02)


def endlessly(connection):
    while True:
        connection.sendall(b"jaxshard " + b"x" * 2**16)


@pytest.mark.parametrize(
    "answer",
    [
        lambda connection: time.sleep(20),
        slowly,
        endlessly,
        lambda connection: connection.close(),
        lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n"),
        lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        lambda connection: connection.sendall(b"jaxshard \n"),
        lambda connection: connection.sendall(b"jaxshard gone\n"),
        lambda connection: connection.sendall(b"jaxshard KeyError 'x'\n"),
        lambda connection: connection.sendall(b"jaxshard ValueError \x1b[2J\n"),
        lambda connection: connection.sendall(b"\xff" * 100),
    ],
)
def test_what_is_no_process_0_does_not_hold_a_caller_up(address, answer, monkeypatch):
    monkeypatch.setattr("jaxshard.processes.start._LAST_WORDS_SECONDS", 0.5)
    with at_most(3):
        with in_its_place(address, answer):
            (error,) = outcomes(address, [(2, 1)], seconds=1.0)
        assert isinstance(error, TimeoutError)
        assert "found no process 0" in str(error)


def test_a_stranger_cannot_say_go_where_the_run_has_an_id(address, monkeypatch):
    monkeypatch.setenv("JAXSHARD_RUN_ID", "mine")
    with in_its_place(address, lambda connection: connection.sendall(b"jaxshard go\n")):
        (error,) = outcomes(address, [(2, 1)], seconds=0.5)
    assert "JAXSHARD_RUN_ID must be the same for all" in str(error)


NO_ADDRESSES = ["host", "host:", ":1234", "host:0", "host:99999", "host:1a", "host:٣", f"h:{9**99}", "host:1:2"]
NO_ADDRESSES += ["http://host:1", " host:1", "[::1:1", "::1]:1", "[host]:1", "a b:1"]


@pytest.mark.parametrize("given", NO_ADDRESSES)
def test_an_address_that_is_none_is_named(given, monkeypatch, address):
    with pytest.raises(ValueError, match=r"coordinator_address .* must be host:port"):
        roll_call(given, 2, 1, 1.0)
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", given)
    with pytest.raises(ValueError, match=r"JAX_COORDINATOR_BIND_ADDRESS .* must be host:port"):
        roll_call(address, 2, 0, 1.0)


# Fuzzed.

PIECES = st.sampled_from(
    [b"jaxshard ", b"jaxshard", b"1", b"2", b" ", b"\n", b"go", b"ValueError ", b"-", b"\0", b"9" * 99]
)
LINES = st.one_of(st.binary(max_size=300), st.lists(PIECES, max_size=8).map(b"".join))
RUNS = st.sampled_from(["", "mine", "\u00e9\udce9"])


def mutated(line, random_of):
    """The line with bytes changed, dropped and doubled."""
    made = bytearray(line)
    for _ in range(random_of.randint(1, 3)):
        at = random_of.randrange(len(made) + 1)
        made[at : at + random_of.randint(0, 2)] = bytes(random_of.choices(range(256), k=random_of.randint(0, 3)))
    return bytes(made)


def check_lines(line, run, random_of):
    call, answer = lines.call_in(line, run), lines.answer_in(line, run)
    assert call is None or 0 < call.rank < call.count
    assert answer is None or answer.split()[0] in ("go", "ValueError", "TimeoutError", "OSError")
    if run:
        assert call is answer is None
    made = lines.call_line(Call(1, 2), run or "mine")
    changed = mutated(made, random_of)
    assert changed == made or lines.call_in(changed, run or "mine") is None  # no change goes unnoticed


@settings(max_examples=200, deadline=None)
@given(LINES, RUNS, st.randoms(use_true_random=False))
def test_lines_of_any_bytes(line, run, random_of):
    check_lines(line, run, random_of)


@pytest.mark.nightly
def test_10_000_lines_of_any_bytes():
    settings(max_examples=10_000, deadline=None)(given(LINES, RUNS, st.randoms(use_true_random=False))(check_lines))()


def a_call(random_of):
    """Bytes that a hostile caller sends, in the pieces in which they come."""
    base = random_of.choice([b"jaxshard 1 3\n", b"jaxshard 99 3\n", b"GET / HTTP/1.0\r\n", b"\x16\x03\x01", b""])
    line = mutated(base, random_of) + random_of.choice([b"", b"x" * random_of.randint(0, 5000), b"\n"])
    cuts = sorted(random_of.randrange(len(line) + 1) for _ in range(random_of.randint(0, 3)))
    return [line[start:end] for start, end in zip([0, *cuts], [*cuts, len(line)], strict=True)]


def strangers_call(address, num_calls, seed):
    """Process 0 has the id of the run; so nothing of what is sent may count, and nothing may hold the run up."""
    random_of = random.Random(seed)
    with process_0(address, count=3, seconds=600) as ended, contextlib.ExitStack() as silent:
        for _ in range(num_calls):
            connection = connected(address)
            with contextlib.suppress(OSError):
                for part in a_call(random_of):
                    connection.sendall(part)
            if random_of.random() < 0.02:
                silent.enter_context(connection)
            else:
                connection.close()
        assert ended == []
        with at_most(5):
            assert outcomes(address, [(3, 1), (3, 2)]) == [None, None]
    assert ended[0] is None


def test_process_0_takes_any_call(address, monkeypatch):
    monkeypatch.setenv("JAXSHARD_RUN_ID", "mine")
    strangers_call(address, 300, seed=0)


@pytest.mark.nightly
def test_process_0_takes_10_000_calls(address, monkeypatch):
    monkeypatch.setenv("JAXSHARD_RUN_ID", "mine")
    strangers_call(address, 10_000, seed=1)


def strangers_answer(address, num_answers, seed):
    """The caller calls again after each answer that is none of process 0's; after many, process 0 is there."""
    random_of, answered = random.Random(seed), []

    def answer(connection):
        answered.append(connection)
        if len(answered) > num_answers:
            connection.recv(100)
            connection.sendall(lines.answer_line("go", "mine"))
            return
        base = random_of.choice([b"jaxshard go\n", lines.answer_line("go", "other"), b"jaxshard ValueError x\n", b""])
        with contextlib.suppress(OSError):
            connection.sendall(mutated(base, random_of))

    with in_its_place(address, answer):
        assert outcomes(address, [(2, 1)], seconds=600) == [None]
    assert len(answered) == num_answers + 1


def test_a_caller_takes_any_answer(address, monkeypatch):
    monkeypatch.setenv("JAXSHARD_RUN_ID", "mine")
    monkeypatch.setattr("jaxshard.processes.start._PAUSE_SECONDS", 0)
    strangers_answer(address, 200, seed=0)


@pytest.mark.nightly
def test_a_caller_takes_10_000_answers(address, monkeypatch):
    monkeypatch.setenv("JAXSHARD_RUN_ID", "mine")
    monkeypatch.setattr("jaxshard.processes.start._PAUSE_SECONDS", 0)
    strangers_answer(address, 10_000, seed=1)
