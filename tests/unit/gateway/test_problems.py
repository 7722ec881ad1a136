"""Errors of the bus as HTTP."""

from rolloutbus.bus.wire.errors import ActorStopped
from rolloutbus.gateway.problems import headers_of, openai_error, status_of


def test_a_gateway_that_ends_sends_who_asked_to_another_one() -> None:
    error = ActorStopped("the client was closed", outcome="unknown")
    assert status_of(error) == 503
    assert headers_of(error)["Retry-After"] == "1"
    assert "ask another gateway" in openai_error(error)["error"]["message"]
