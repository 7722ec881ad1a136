"""SGLang's replies to commands about weights: `success`, and a sentence."""

from fastapi import Request, Response

from rolloutbus.bus.wire.errors import BusError, Refused
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.gateway.exchange import Endpoint, Json, as_json
from rolloutbus.gateway.problems import headers_of, openai_error, status_of


def telling_success(answer: Endpoint, *, sentence: str = "message") -> Endpoint:
    """Returns `answer` with errors of the bus as SGLang tells them, beside the gateway's own shape.

    Args:
        answer: an endpoint.
        sentence: the field that SGLang has the reason in.
    """

    async def answered(request: Request) -> Response:
        try:
            return await answer(request)
        except BusError as error:
            told = openai_error(error)
            content = {"success": False, sentence: told["error"]["message"], **told}
            response = as_json(content, status_of(error))
            response.headers.update(headers_of(error))
            return response

    return answered


def refuse_unserved(body: Json, unserved: dict[str, str]) -> Json:
    """Returns a body without SGLang's fields that are not served and ask for nothing.

    Args:
        body: as it came.
        unserved: field -> why it is not served, and what to do instead.

    Raises:
        Refused: one of these fields asks for something.
    """
    for name, why in unserved.items():
        if body.get(name):
            raise Refused(Problem("unsupported", f"{name}: {why}", "not_started", field=name))
    return {name: value for name, value in body.items() if name not in unserved}
