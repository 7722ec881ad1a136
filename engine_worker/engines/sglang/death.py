"""Why SGLang died or gave a request up, as far as its words tell."""

import re

WORDLESS = "a scheduler process of SGLang has ended without a word"
ADVICE = "lower `mem_fraction_static`, `slots` or `max_context`"

_NO_MEMORY = re.compile(
    r"out of memory|OutOfMemory|OUT_OF_MEMORY|ALLOC_FAILED|bad_alloc|MemoryError"
    r"|can't allocate memory|cannot allocate memory|no enough memory|not enough memory",
    re.IGNORECASE,
)


def is_out_of_memory(words: str) -> bool:
    """Whether something, on a GPU or off it, had no room."""
    return _NO_MEMORY.search(words) is not None


def cause_of(last_words: str) -> str:
    """For people: the cause of a scheduler's end, from what it said last."""
    if is_out_of_memory(last_words):
        return f"out of memory ({ADVICE}): {last_words}"
    return last_words or WORDLESS
