"""Signals: what each does first and second, and that handlers go back to what they were."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from cbgen.errors import Stopped
from cbgen.signals import StopSignals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_remembered(number):
    with StopSignals() as signals:
        signals.raise_at_once = False
        assert signals.requested == ""
        signal.raise_signal(number)
        assert signals.requested == number.name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_before_generation_the_first_signal_raises(number):
    with StopSignals(), pytest.raises(Stopped, match=number.name):
        signal.raise_signal(number)


def test_a_commit_is_asked_for_once_and_stops_nothing():
    with StopSignals() as signals:
        assert not signals.take_commit_request()
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert signals.commit_requested
        assert signals.take_commit_request()
        assert not signals.take_commit_request()
        assert signals.requested == ""


def test_handlers_are_put_back():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    with StopSignals():
        assert [signal.getsignal(number) for number in numbers] != before
    assert [signal.getsignal(number) for number in numbers] == before


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert signals.requested == ""
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_it_sets_no_handler():
    seen = []

    def body():
        with StopSignals() as signals:
            seen.append(signals.requested)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [""]


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        ("SIGINT", "SIGINT", 130),
        ("SIGTERM", "SIGINT", 130),
        ("SIGHUP", "SIGTERM", 130),
        ("SIGHUP", "SIGHUP", 7),
        ("SIGTERM", "SIGHUP", 7),
        ("SIGUSR1", "SIGTERM", 7),
    ],
)
def test_a_second_signal_ends_at_once_but_a_second_hangup_does_not(first, second, code):
    program = (
        "import signal, sys\n"
        "from cbgen.signals import StopSignals\n"
        "with StopSignals() as signals:\n"
        "    signals.raise_at_once = False\n"
        f"    signal.raise_signal(signal.{first})\n"
        f"    signal.raise_signal(signal.{second})\n"
        "    sys.exit(7)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], env=os.environ, capture_output=True, check=False)
    assert result.returncode == code
