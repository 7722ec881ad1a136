"""Children of a process are found although its threads come and go."""

import os
import subprocess
import sys
import threading

from rolloutbus.launcher.fleet import children_of

NO_PROCESS = 1 << 30
N_LOOKS = 500


def test_threads_that_end_meanwhile_are_no_error() -> None:
    is_over = threading.Event()

    def churn() -> None:
        while not is_over.is_set():
            thread = threading.Thread(target=is_over.is_set)
            thread.start()
            thread.join()

    churning = [threading.Thread(target=churn) for _ in range(4)]
    waiting = [sys.executable, "-c", "input()"]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        for thread in churning:
            thread.start()
        try:
            for _ in range(N_LOOKS):
                assert child.pid in children_of(os.getpid())
        finally:
            is_over.set()
            for thread in churning:
                thread.join()
            child.communicate(b"\n")


def test_process_that_has_ended_has_none() -> None:
    assert children_of(NO_PROCESS) == []
