"""Errors of the bus as HTTP: a status, headers and OpenAI's error object."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec

from rolloutbus.bus.wire.errors import (
    ActorStopped,
    BusError,
    DeadlineExceeded,
    DeliveryError,
    EngineFailed,
    MailboxFull,
    Refused,
    RequestError,
    RequestExpired,
)
from rolloutbus.trainer_adapter.client.core.results import FleetCommandFailed

STATUS_OF_CODE: Mapping[str, HTTPStatus] = {
    "bad_request": HTTPStatus.BAD_REQUEST,
    "unknown_message": HTTPStatus.BAD_REQUEST,
    "unsupported": HTTPStatus.BAD_REQUEST,
    "result_too_large": HTTPStatus.BAD_REQUEST,
    "forbidden": HTTPStatus.FORBIDDEN,
    "unknown_model": HTTPStatus.NOT_FOUND,
    "unknown_worker": HTTPStatus.NOT_FOUND,
    "unknown_policy": HTTPStatus.NOT_FOUND,
    "unknown_request": HTTPStatus.NOT_FOUND,
    "unknown_session": HTTPStatus.NOT_FOUND,
    "session_taken": HTTPStatus.CONFLICT,
    "duplicate_rid": HTTPStatus.CONFLICT,
    "stale_version": HTTPStatus.CONFLICT,
    "update_in_progress": HTTPStatus.CONFLICT,
    "no_delta": HTTPStatus.CONFLICT,
    "busy": HTTPStatus.TOO_MANY_REQUESTS,
    "not_ready": HTTPStatus.SERVICE_UNAVAILABLE,
    "version_unavailable": HTTPStatus.SERVICE_UNAVAILABLE,
    "no_store": HTTPStatus.SERVICE_UNAVAILABLE,
    "store_full": HTTPStatus.SERVICE_UNAVAILABLE,
    "worker_lost": HTTPStatus.SERVICE_UNAVAILABLE,
    "engine_died": HTTPStatus.SERVICE_UNAVAILABLE,
    "deadline": HTTPStatus.GATEWAY_TIMEOUT,
}
"""Code of a problem -> status; any other is a failure of the fleet, 500."""

TYPE_OF_STATUS: Mapping[HTTPStatus, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.CONFLICT: "conflict_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
"""OpenAI's word; others in the 400s are `invalid_request_error`, in the 500s `server_error`."""

AGAIN_S = 1
"""When to try again, where the router names no time."""
REASON = "x-error-message"
MAX_REASON = 500
"""Characters of it in a header."""
ENDING = "this gateway ends, and what became of the request is not known; ask another gateway"
SHORT_OF_ROOM = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})


def status_of(error: BusError) -> HTTPStatus:
    """HTTP status of an error."""
    match error:
        case RequestExpired() | DeadlineExceeded():
            return HTTPStatus.GATEWAY_TIMEOUT
        case RequestError():
            return STATUS_OF_CODE.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)
        case FleetCommandFailed():
            found = {status_of(each) for each in error.result.errors.values()}
            is_one = len(found) == 1 and not error.result.silent
            return found.pop() if is_one else HTTPStatus.INTERNAL_SERVER_ERROR
        case MailboxFull():
            return HTTPStatus.TOO_MANY_REQUESTS
        case DeliveryError() | ActorStopped():
            return HTTPStatus.SERVICE_UNAVAILABLE
        case _:
            return HTTPStatus.INTERNAL_SERVER_ERROR


def headers_of(error: BusError) -> dict[str, str]:
    """The sentence of the body, for clients that look at no body, and when to try again.

    `Retry-After` is in whole seconds, where another try may help.
    """
    told = openai_error(error)["error"]["message"]
    plain = told.encode("ascii", "replace").decode()
    headers = {REASON: "".join(each if each.isprintable() else " " for each in plain)[:MAX_REASON]}
    if status_of(error) in SHORT_OF_ROOM:
        wait_ms = error.retry_after_ms if isinstance(error, RequestError) else 0
        headers["Retry-After"] = str(-(-wait_ms // 1000) or AGAIN_S)
    return headers


def with_field_of(names: Mapping[str, str], error: BusError) -> BusError:
    """The same error; a wrong field has its name in the body, where `sampling_params` has sampling.

    Args:
        names: name of a field on the bus -> in the body, where they differ by more.
        error: of the bus.
    """
    if not isinstance(error, Refused | EngineFailed):
        return error
    field = error.field.removeprefix("place.")
    part, dot, rest = field.partition(".")
    usual = f"sampling_params{dot}{rest}" if part == "sampling" else field
    problem = msgspec.structs.replace(error.problem, field=names.get(field, usual))
    return type(error)(problem, rid=error.rid)


def openai_error(error: BusError) -> dict[str, Any]:
    """Body of the response, in OpenAI's shape; `param` is the wrong field, `code` the bus's."""
    is_request = isinstance(error, RequestError)
    message = error.problem.message if is_request else str(error)
    return error_body(
        status_of(error),
        ENDING if isinstance(error, ActorStopped) else message,
        param=error.field if is_request else "",
        code=error.code if is_request else "",
    )


def error_body(
    status: HTTPStatus, message: str, *, param: str = "", code: str = ""
) -> dict[str, Any]:
    """OpenAI's error object."""
    is_ours = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    plain = "server_error" if is_ours else "invalid_request_error"
    kind = TYPE_OF_STATUS.get(status, plain)
    return {
        "error": {"message": message, "type": kind, "param": param or None, "code": code or None}
    }
