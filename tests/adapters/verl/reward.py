"""A reward function, as verl loads it from a file."""


def compute_score(solution_str: str, **_: object) -> float:
    """How many different characters there are."""
    return float(len(set(solution_str)))
