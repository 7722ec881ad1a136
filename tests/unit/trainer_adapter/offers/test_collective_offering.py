# pyright: reportUnknownMemberType=false
# The stubs of torch leave parameters untyped.

import asyncio
import socket
import threading
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from rolloutbus.bus.weights.manifest import lay_out
from rolloutbus.bus.weights.rank_group import GO, WORLD, RankReport, joined_key, write_report
from rolloutbus.bus.weights.shm import host_id
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.trainer_adapter.publisher.collective import CollectiveOffering
from tests.unit.trainer_adapter.slow_names import SlowNames

LAYOUT = lay_out([("a", "F32", (4,))])
TENSORS = [torch.arange(4.0)]


async def test_an_offer_on_loopback_is_for_this_host_alone() -> None:
    offering = CollectiveOffering()
    (offer,) = await offering.prepare(LAYOUT, TENSORS)
    await offering.close()
    assert (offer.host, offer.backend) == (host_id(), "gloo")
    assert offer.at.startswith("127.0.0.1:")


class Slow(torch.Tensor):
    """Its copy waits until it may end."""

    has_begun, may_end = threading.Event(), threading.Event()

    @classmethod
    def __torch_function__(cls, *call: Any, **kwargs: Any) -> object:  # noqa: ANN401 - any call
        if call[0] is torch.Tensor.copy_:
            cls.has_begun.set()
            assert cls.may_end.wait(30.0)
        return cast("object", super().__torch_function__(*call, **kwargs))


async def test_a_copy_that_is_cancelled_writes_nothing_into_the_next_one() -> None:
    offering = CollectiveOffering()
    preparing = asyncio.create_task(offering.prepare(LAYOUT, [torch.zeros(4).as_subclass(Slow)]))
    assert await asyncio.to_thread(Slow.has_begun.wait, 30.0)
    preparing.cancel()
    for _ in range(20):  # turns of the loop: more than a cancellation takes
        await asyncio.sleep(0)
    assert not preparing.done()
    Slow.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    await offering.close()


async def test_an_address_that_is_not_ours_is_not_offered() -> None:
    offering = CollectiveOffering(host="192.0.2.1")
    assert await offering.prepare(LAYOUT, TENSORS) == []
    assert "192.0.2.1" in offering.problem
    await offering.serve()
    await offering.close()


async def test_a_name_that_is_looked_up_slowly_holds_nothing_else_up(
    slow_names: SlowNames,
) -> None:
    offering = CollectiveOffering(host=slow_names.HOST)
    preparing = asyncio.create_task(offering.prepare(LAYOUT, TENSORS))
    async with asyncio.timeout(30.0):
        await slow_names.asked()  # the loop runs meanwhile
        assert not preparing.done()
        slow_names.may_answer.set()
        (offer,) = await preparing
    await offering.close()
    host, _, port = offer.at.rpartition(":")
    assert (host, offering.problem) == ("127.0.0.1", "no worker has asked for it")
    assert port.isdecimal()
    assert offer.host == host_id()  # nobody on another host can reach it


async def test_a_name_that_is_not_answered_in_time_is_not_offered(slow_names: SlowNames) -> None:
    offering = CollectiveOffering(host=slow_names.HOST, timeout_s=0.05)
    async with asyncio.timeout(30.0):
        assert await offering.prepare(LAYOUT, TENSORS) == []
    assert offering.problem == (
        f"host: {slow_names.HOST!r} cannot be resolved now: no answer within 0.05 s"
    )


@pytest.mark.parametrize("code", [socket.EAI_NONAME, socket.EAI_AGAIN, socket.EAI_SYSTEM])
async def test_a_name_that_does_not_exist_is_refused_and_one_that_nobody_tells_is_not_offered(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: object) -> None:
        raise socket.gaierror(code, "why")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    offering = CollectiveOffering(host="trainer-0")
    if code != socket.EAI_NONAME:
        assert await offering.prepare(LAYOUT, TENSORS) == []
        assert offering.problem.startswith("host: 'trainer-0' cannot be resolved now")
    else:
        with pytest.raises(SettingsError, match=r"host: 'trainer-0' cannot be resolved: .*why"):
            await offering.prepare(LAYOUT, TENSORS)


async def test_tensors_on_a_cpu_are_not_offered_over_nccl() -> None:
    assert await CollectiveOffering("nccl").prepare(LAYOUT, TENSORS) == []


async def test_a_rank_that_waits_for_others_is_let_go_when_the_offer_is_called_off() -> None:
    offering = CollectiveOffering()
    (offer,) = await offering.prepare(LAYOUT, TENSORS)
    host, _, port = offer.at.rpartition(":")
    wait = timedelta(seconds=30)
    rank = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host, int(port), is_master=False, timeout=wait, wait_for_workers=False
    )
    async with asyncio.timeout(30.0):  # the ranks have 60
        serving = asyncio.create_task(offering.serve())
        rank.set(WORLD, "3")
        rank.set(joined_key(1), write_report(RankReport()))
        await asyncio.sleep(0)  # lets it begin to wait
        offering.call_off()
        offering.call_off()
        await asyncio.to_thread(rank.wait, [GO], wait)
        await serving
    assert rank.get(GO) == b"the workers got new commands"
    assert offering.problem.endswith("got new commands")
    await offering.close()


async def test_an_offer_that_nobody_takes_is_withdrawn_at_once() -> None:
    offering = CollectiveOffering()
    for _ in range(2):
        await offering.prepare(LAYOUT, TENSORS)
        serving = asyncio.create_task(offering.serve())
        await asyncio.sleep(0)  # lets it begin to wait
        async with asyncio.timeout(30.0):
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await offering.close()
            await offering.close()
        assert offering.problem == "no worker has asked for it"
    offering.forget()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"timeout_s": 1e10}, "timeout_s"),
        ({"host": ""}, "host"),
        ({"bucket_bytes": 0}, "bucket_bytes"),
    ],
)
def test_settings_that_no_offer_could_be_made_with_are_refused(
    settings: dict[str, Any], field: str
) -> None:
    with pytest.raises(SettingsError, match=field):
        CollectiveOffering(**settings)
