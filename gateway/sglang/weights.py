"""SGLang's `/get_weights_by_name` and `/weights_checker`: what the workers really hold."""

from typing import Annotated, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response

from rolloutbus.bus.wire.errors import BusError, DeadlineExceeded, Refused
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.gateway.exchange import Json, as_json, body_of, converted, while_connected
from rolloutbus.gateway.headers import version_headers
from rolloutbus.gateway.settings import GatewaySettings
from rolloutbus.gateway.sglang.replies import refuse_unserved, telling_success
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.weight_queries import ActiveTensor, WeightsReport

WORKER = "x-worker"
"""Header that tells whose weights an answer holds."""
ACTIONS = {
    "snapshot": "the store keeps every version's digests, so there is nothing to take: send "
    "`compare`, which compares what is active with the version that a worker attests",
    "reset_tensors": "a fleet that serves does not have its weights overwritten with noise: send "
    "`compare`, which needs no reset",
}
"""SGLang's actions that are not served -> why not, and what to do."""
UNSERVED_CHECK = {
    "allow_quant_error": "bytes are compared by digest, so there is no error to allow; leave it out"
}
UNSERVED_GET = {"rid": "it names no request; leave it out"}


class GetBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/get_weights_by_name`."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    truncate_size: Annotated[int, msgspec.Meta(ge=1)] = 100
    """So many elements, or rows, along the first dimension."""
    worker: str = ""
    """Whose; empty: of any that takes requests."""
    policy: str = "default"


class CheckBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/weights_checker`."""

    action: Literal["checksum", "compare", "snapshot", "reset_tensors"] = "checksum"
    selector: Literal["all"] = "all"
    """Of which model's weights; there are no others here."""


class WeightsApi:
    """Answers through a client of the bus."""

    def __init__(self, client: RolloutClient, settings: GatewaySettings) -> None:
        self._client = client
        self._settings = settings
        self.router = APIRouter()
        for path, answer in (
            ("/get_weights_by_name", self.get_by_name),
            ("/weights_checker", telling_success(self.check)),
        ):
            self.router.add_api_route(path, answer, methods=["GET", "POST"])

    async def get_by_name(self, request: Request) -> Response:
        """`POST /get_weights_by_name`: the first values of one tensor, as one worker has it."""
        fields = await body_of(request, self._settings.max_body_bytes)
        body = converted(refuse_unserved(fields, UNSERVED_GET), GetBody)
        worker = body.worker or await self._any_worker(body.policy)
        work = self._client.get_weights(body.name, worker, max_rows=body.truncate_size)
        try:
            tensor = await while_connected(request, work)
        except TimeoutError as error:
            message = "versions changed faster than the tensor could be read"
            raise DeadlineExceeded(message) from error
        headers = {WORKER: worker, **version_headers([(tensor.version, 1)])}
        return as_json(_numbers(tensor), headers=headers)

    async def _any_worker(self, policy: str) -> str:
        """Raises Refused: no worker of the policy takes requests."""
        for each in (await self._client.status()).workers:
            if each.policy == policy and not each.blocked_by:
                return each.name
        message = f"no worker of the policy {policy[:64]!r} takes requests"
        raise Refused(Problem("not_ready", message, "not_started", field="policy"))

    async def check(self, request: Request) -> Response:
        """`POST /weights_checker`: digests of all workers' weights, compared with the store's."""
        fields = await body_of(request, self._settings.max_body_bytes)
        body = converted(refuse_unserved(fields, UNSERVED_CHECK), CheckBody)
        if body.action in ACTIONS:
            message = f"{body.action}: {ACTIONS[body.action]}"
            raise Refused(Problem("unsupported", message, "not_started", field="action"))
        report = await while_connected(request, self._client.check_weights())
        if not report.by_worker and not report.errors and not report.silent:
            raise Refused(Problem("not_ready", "there is no worker", "not_started"))
        return as_json(_reply(report), 200 if report.is_ok else 400)


def _numbers(tensor: ActiveTensor) -> object:
    """As JSON has them.

    Raises:
        Refused: they are of a type that has no numbers here.
    """
    try:
        return tensor.array.astype(np.float32).tolist()
    except ValueError as error:
        raise Refused(Problem("unsupported", str(error), "not_started", field="name")) from error


def _reply(report: WeightsReport) -> Json:
    told: Json = {"success": report.is_ok, "message": _sentence(report)}
    checksums = {each.checksum for each in report.by_worker.values()}
    if report.is_ok and len(checksums) == 1:
        told["per_engine_checksum"] = checksums.pop()
    told["workers"] = {
        name: {**msgspec.to_builtins(each), "is_ok": each.is_ok}
        for name, each in report.by_worker.items()
    }
    return told


def _sentence(report: WeightsReport) -> str:
    """Who holds what it says it holds, and who does not."""
    bad = [f"{name} holds other bytes" for name, each in report.by_worker.items() if not each.is_ok]
    bad += [f"{name}: {_told(error)}" for name, error in report.errors.items()]
    bad += [f"{name} did not answer" for name in report.silent]
    if bad:
        return "; ".join(bad)
    return f"all {len(report.by_worker)} workers hold the bytes of the version that they attest"


def _told(error: BusError) -> str:
    return str(error)
