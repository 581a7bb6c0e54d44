"""Guards in one process; several are in tests/faults."""

import ctypes
import faulthandler
import os
import signal
import threading
import time

import pytest

from jaxshard.guards import HUNG, Preemption, Watchdog

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_asks_and_the_handlers_come_back(number):
    said, before = [], signal.getsignal(number)
    with Preemption(said.append) as preemption:
        assert not preemption.reached(0)
        os.kill(os.getpid(), number)
        assert preemption.reached(1)
        assert preemption.status == 128 + number
    assert said == [f"{number.name}: the model is saved after this step (a second signal ends the run without saving)"]
    assert signal.getsignal(number) == before
    with preemption:  # used again, it knows of no signal
        assert not preemption.reached(2)


def test_a_second_ctrl_c_is_one():
    with Preemption() as preemption:
        os.kill(os.getpid(), signal.SIGINT)
        assert preemption.reached(0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_terminal_that_closes_sends_many_and_none_of_them_ends_at_once():
    """A shell and the kernel send SIGHUP each, and systemd SIGTERM too: the second one would lose what is not saved."""
    said = []
    for later, status in (([signal.SIGHUP] * 2, 129), ([signal.SIGTERM, signal.SIGHUP], 143), ([signal.SIGINT], 130)):
        with Preemption(said.append) as preemption:
            for number in (signal.SIGHUP, *later):
                os.kill(os.getpid(), number)
            assert preemption.reached(0)
            assert preemption.status == status
    assert len(said) == 3


@pytest.mark.parametrize("first", [signal.SIGUSR1, signal.SIGUSR2])
def test_slurms_signals_before_the_end_come_before_sigterm(first):
    """Slurm's `--signal=USR1@120`, and SIGTERM 120 s later, where the save may not be written yet."""
    left = []
    with Preemption() as preemption:
        preemption._leave = left.append
        for number, status in ((first, 128 + first), (signal.SIGTERM, 143), (first, 143), (signal.SIGTERM, 143)):
            assert left == []
            os.kill(os.getpid(), number)
            assert preemption.reached(0)
            assert preemption.status == status
    assert left == [signal.SIGTERM]


def test_the_same_signal_of_slurms_twice_ends_at_once():
    left = []
    with Preemption() as preemption:
        preemption._leave = left.append
        os.kill(os.getpid(), signal.SIGUSR1)
        assert left == []
        os.kill(os.getpid(), signal.SIGUSR1)
    assert left == [signal.SIGUSR1]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_the_program_uses_itself_is_left_alone(number, tmp_path):
    """`faulthandler.register` is C: Python's `signal.getsignal` does not know of it."""
    with (tmp_path / "stacks").open("w+") as file:
        faulthandler.register(number, file=file)
        try:
            with Preemption() as preemption:
                os.kill(os.getpid(), number)
                assert not preemption.reached(0)
            file.seek(0)
            assert "test_a_signal_that_the_program_uses_itself" in file.read()
        finally:
            faulthandler.unregister(number)
    heard = []
    before = signal.signal(number, lambda *_: heard.append(number))
    try:
        with Preemption() as preemption:
            os.kill(os.getpid(), number)
            assert not preemption.reached(0)
        assert heard == [number]
    finally:
        signal.signal(number, before)


def test_under_nohup_a_hangup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Preemption() as preemption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not preemption.reached(0)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_where_a_library_ignores_hangups_for_itself_they_are_heard():
    """As libtpu does: a run on a TPU heard nothing of its terminal."""
    ctypes.CDLL(None).signal(signal.SIGHUP, ctypes.c_void_p(int(signal.SIG_IGN)))
    with Preemption() as preemption:
        os.kill(os.getpid(), signal.SIGHUP)
        assert preemption.reached(0)


def test_preemption_where_it_cannot_be():
    with Preemption() as preemption, pytest.raises(RuntimeError, match="already entered"):
        preemption.__enter__()
    found = []

    def elsewhere():
        with pytest.warns(UserWarning, match="only in the main thread"), Preemption() as preemption:
            found.append(preemption.reached(0))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [False]


def test_a_watchdog_barks_only_when_nothing_is_heard(capfd):
    exits = []
    watchdog = Watchdog(0.5, exits.append)
    for _ in range(2):
        with watchdog:
            for _ in range(12):
                time.sleep(0.1)
                watchdog.beat()
    assert exits == []
    with watchdog:
        time.sleep(1.5)
    assert exits == [HUNG]
    assert "took no step for" in capfd.readouterr().err


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_watchdog_needs_time(seconds):
    with pytest.raises(ValueError, match="must be above 0"):
        Watchdog(seconds)


class Broken:
    """Where nobody reads any more."""

    def write(self, text):
        raise BrokenPipeError

    flush = fileno = write


def test_a_watchdog_barks_where_nobody_hears(monkeypatch):
    exits = []
    monkeypatch.setattr("sys.__stderr__", Broken())
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    with Watchdog(0.2, exits.append):
        time.sleep(0.8)
    assert exits == [HUNG]


@pytest.mark.parametrize("error", [BrokenPipeError, SystemExit, RuntimeError])
def test_a_signal_counts_also_where_nothing_can_be_said(error):
    def say(text):
        raise error

    with Preemption(say) as preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.reached(0)
