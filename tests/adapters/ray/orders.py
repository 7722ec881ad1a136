"""What a program of these tests does with its stdin and stdout: a line of JSON each way."""

import json
import os
import sys
from typing import Any, TextIO


class Orders:
    """Orders of a test, and answers to it; whatever else is printed goes to stderr."""

    def __init__(self) -> None:
        self._answers: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def answer(self, **told: object) -> None:
        """Tell the test."""
        self._answers.write(f"{json.dumps(told)}\n")
        self._answers.flush()

    def next(self) -> dict[str, Any]:
        """Wait for an order; `{"do": "stop"}` when the test has hung up."""
        line = sys.stdin.readline()
        return json.loads(line) if line else {"do": "stop"}
