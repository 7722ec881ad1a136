import os
import signal
import subprocess
import sys

import pytest

from rolloutbus.bus.weights.cuda_memory import Loan, NotLent, borrow

BORROWER = """
import sys
from rolloutbus.bus.weights.cuda_memory import borrow
loan = borrow(int(sys.argv[1]), int(sys.argv[2]))
print("borrowed", flush=True)
sys.stdin.read()
"""


def start_borrower(loan: Loan) -> subprocess.Popen[str]:
    pid, fd = loan.name
    return subprocess.Popen(
        [sys.executable, "-c", BORROWER, str(pid), str(fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_what_is_borrowed_cannot_be_recalled_until_it_is_given_back() -> None:
    loan = Loan()
    loan.lend()
    borrowed = borrow(*loan.name)
    assert not loan.recall()
    borrowed.give_back()
    borrowed.give_back()
    assert loan.recall()
    loan.close()


def test_what_is_recalled_cannot_be_borrowed_until_it_is_lent_again() -> None:
    loan = Loan()
    with pytest.raises(NotLent, match="writing"):
        borrow(*loan.name)
    loan.lend()
    borrow(*loan.name).give_back()
    loan.close()


def test_a_killed_borrower_borrows_no_more() -> None:
    loan = Loan()
    loan.lend()
    with start_borrower(loan) as borrower:
        assert borrower.stdout is not None
        assert borrower.stdout.readline() == "borrowed\n"
        assert not loan.recall()
        borrower.send_signal(signal.SIGKILL)
        borrower.wait()
    assert loan.recall()
    loan.close()


def test_several_borrow_at_once() -> None:
    loan = Loan()
    loan.lend()
    first, second = borrow(*loan.name), borrow(*loan.name)
    first.give_back()
    assert not loan.recall()
    second.give_back()
    assert loan.recall()
    loan.close()


def test_other_descriptors_and_dead_processes_lend_nothing() -> None:
    loan = Loan()
    name = loan.name
    loan.close()
    loan.close()
    with pytest.raises(NotLent):
        borrow(*name)
    with pytest.raises(NotLent, match="is not a loan"):
        borrow(os.getpid(), 0)
    with pytest.raises(NotLent, match="lends nothing"):
        borrow(2**22 + 1, 3)
