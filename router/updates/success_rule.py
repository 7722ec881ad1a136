"""How many workers a publication needs: `all`, `quorum`, `any` or `at-least:N`.

Spec: docs/protocol.md, "Weights".
"""

RULES = "all, quorum, any and at-least:N (N from 1 on)"
"""What may be asked for, for people."""
COUNTS_ALL = frozenset({"all", "quorum"})
"""Rules for which it matters how many workers there are in all."""


def n_needed(require: str, n_targets: int) -> int | None:
    """How many of `n_targets` expected workers the rule asks for; None if there is no such rule."""
    match require.partition(":"):
        case ("all", "", ""):
            return n_targets
        case ("quorum", "", ""):
            return n_targets // 2 + 1
        case ("any", "", ""):
            return 1
        case ("at-least", _, n) if n.isascii() and n.isdecimal() and int(n) > 0:
            return int(n)
        case _:
            return None
