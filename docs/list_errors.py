"""Writes docs/reference/errors.md, each code with what to do about it: `make docs`."""

from http import HTTPStatus
from pathlib import Path

from rolloutbus.bus.wire import errors
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.problem_codes import CODES, LOCAL_CODES
from rolloutbus.gateway.problems import STATUS_OF_CODE
from rolloutbus.trainer_adapter.client.core.endings import error_of

PAGE = Path(__file__).with_name("reference") / "errors.md"
HEAD = """# Errors and what to do

<!-- Made by `make docs` from bus/wire/problem_codes.py and bus/wire/errors.py: edit those. -->

An error has a class, a **code** and an **outcome**. Branch on these, never on the text.

```python
from rolloutbus.errors import DeliveryError, Refused, RequestError

try:
    rollout = await client.generate([1, 2, 3], sampling, versions="exact:99", deadline_s=1)
except Refused as error:  # nothing was started: safe to ask again
    print(error.code, error.field, error.retry_after_ms)
except RequestError as error:
    print(error.code, error.outcome)
except DeliveryError as error:  # nobody answered in time: no code
    print(error.outcome)
```

| outcome | means |
|---|---|
| `not_started` | nothing ran: ask again, here or elsewhere |
| `unknown` | it may have run: repeat only what may run twice |
| `failed` | it ran and did not succeed |

Clients repeat by themselves what time heals: a lost message, a worker or router that died, a
worker that is not ready yet. What reaches your program is final for this request.

## Codes

"""
TREE = """## Classes

`rolloutbus.errors` has them. The line says what state the error leaves the world in.

```text
"""


def page() -> str:
    """The page as it is to be."""
    tree = (errors.__doc__ or "").partition("\n\n")[2].partition("\n\nCallers")[0]
    lines = [line.removeprefix("    ") for line in tree.splitlines()]
    return HEAD + _codes() + _local() + TREE + "\n".join(lines) + "\n```\n"


def _codes() -> str:
    parts: list[str] = []
    for name, code in CODES.items():
        raised = dict.fromkeys(
            type(error_of(ending, Problem(name, "", code.outcomes[0]), "")).__name__
            for ending in code.endings
        )
        status = STATUS_OF_CODE.get(name, HTTPStatus.INTERNAL_SERVER_ERROR)
        kinds = ", ".join(f"`{each}`" for each in raised)
        parts.append(
            f"### {name}\n\n{kinds}; outcome {', '.join(code.outcomes)}; HTTP {status.value}\n\n"
            f"{code.meaning[0].upper()}{code.meaning[1:]}.\n\n**What to do:** {code.advice}\n\n"
        )
    return "".join(parts)


def _local() -> str:
    parts = [f"### {name}\n\n{advice}\n\n" for name, advice in LOCAL_CODES.items()]
    return "## Codes that never cross the bus\n\nA client or a gateway makes them itself.\n\n" + (
        "".join(parts)
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
