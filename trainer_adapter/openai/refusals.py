"""Refusing a body by the name of its field."""

import msgspec

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.endings import Problem, bad_request

NAMES_IN_BODIES = {
    "sampling.max_new_tokens": "max_tokens",
    "sampling.min_new_tokens": "min_tokens",
    "sampling.sampling_seed": "seed",
    "deadline_s": "timeout",
    "session": "session_id",
    "lora": "lora_path",
    "grammar": "response_format",
    "want.top_logprobs": "top_logprobs",
    "media": "messages",
    "place.session": "session_id",
    "place.policy": "policy",
    "place.versions": "versions",
    "place.priority": "priority",
}
"""Our name of a field -> OpenAI's, or what users of other servers know; others are the same."""


def refusal(field: str, message: str) -> Refused:
    """A value of the body is wrong."""
    return Refused(bad_request(field, message))


def unsupported(field: str, message: str) -> Refused:
    """The body asks for what cannot be done here."""
    return Refused(Problem("unsupported", message, "not_started", field=field))


def by_body(problem: Problem) -> Problem:
    """The same problem under the field's name in the body."""
    field = NAMES_IN_BODIES.get(problem.field, problem.field.removeprefix("sampling."))
    return msgspec.structs.replace(problem, field=field)
