"""Children and Ctrl-C."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor

import pytest

from dapo_async.signals import ctrl_c_held_back, leave_ctrl_c


def blocked() -> set[int]:
    return {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, set())}


def left() -> tuple[bool, bool]:
    """Whether SIGINT is blocked and ignored after `leave_ctrl_c`, though one was waiting."""
    os.kill(os.getpid(), signal.SIGINT)
    leave_ctrl_c()
    return signal.SIGINT in blocked(), signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_every_process_of_a_pool_begins_with_ctrl_c_blocked_until_it_leaves_it() -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        with ctrl_c_held_back():  # the second process may be started by a thread of the pool
            masks = [pool.submit(blocked), pool.submit(blocked)]
            leaving = pool.submit(left)
        assert all(signal.SIGINT in mask.result(60) for mask in masks)
        assert leaving.result(60) == (False, True)
    assert signal.SIGINT not in blocked()


def test_ctrl_c_held_back_arrives_at_the_end_of_the_block() -> None:
    done = False
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored here
    try:
        with pytest.raises(KeyboardInterrupt), ctrl_c_held_back():
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # no thread but this one
            done = True
    finally:
        signal.signal(signal.SIGINT, before)
    assert done
