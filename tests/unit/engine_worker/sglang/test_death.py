"""Out of memory is recognised in whatever words a library has for it."""

import pytest

from rolloutbus.engine_worker.engines.sglang.live import (
    ADVICE,
    WORDLESS,
    cause_of,
    is_out_of_memory,
)


@pytest.mark.parametrize(
    "words",
    [
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to",
        "MemoryError: std::bad_alloc",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "torch.AcceleratorError: HIP error: out of memory",
    ],
)
def test_want_of_memory_is_told_with_what_to_do(words: str) -> None:
    assert is_out_of_memory(words)
    assert cause_of(words).startswith("out of memory")
    assert ADVICE in cause_of(words)
    assert words in cause_of(words)


@pytest.mark.parametrize(
    "words",
    [
        "AssertionError: release_memory_occupation should be called only when server is idle.",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "KeyError: 'kv_cache'",
    ],
)
def test_other_causes_are_told_as_they_are(words: str) -> None:
    assert not is_out_of_memory(words)
    assert cause_of(words) == words


def test_an_end_without_words_is_told_as_such() -> None:
    assert cause_of("") == WORDLESS
