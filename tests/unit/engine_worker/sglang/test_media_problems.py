"""What is wrong with a request's media, as its client is told."""

import pytest

from rolloutbus.engine_worker.engines.sglang.live import problem_of, status_of


def _raised(cause: Exception) -> RuntimeError:
    """As SGLang raises it: in two wrappings."""
    inner, outer = RuntimeError("while loading data"), RuntimeError("loading AUDIO data at index 0")
    inner.__cause__, outer.__cause__ = cause, inner
    return outer


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        (ModuleNotFoundError("No module named 'soundfile'"), "unsupported"),
        (ValueError("not an image"), "bad_request"),
    ],
)
def test_a_missing_package_is_told_apart_from_bytes_that_are_no_media(
    cause: Exception, code: str
) -> None:
    error = _raised(cause)
    problem = problem_of(str(error), status_of(error, 500, has_media=True))
    assert (problem.code, problem.field, problem.outcome) == (code, "media", "not_started")
    assert status_of(error, 500, has_media=False) == 500
