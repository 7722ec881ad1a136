"""A version belongs to the fleet whose store gave it its number, and is settled there."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import cast

import pytest
import torch

from rolloutbus.bus.actor.ref import ActorRef, Command
from rolloutbus.bus.wire.errors import DeadlineExceeded, OtherFleet, PeerLost
from rolloutbus.bus.wire.messages.membership import Member, Members, Welcome
from rolloutbus.bus.wire.messages.weights import (
    Reserved,
    ReserveVersion,
    RestoreVersion,
    Settled,
    UpdateProgress,
    VersionRestored,
)
from rolloutbus.trainer_adapter.client.commands import FleetRef
from rolloutbus.trainer_adapter.client.connection import Connection
from rolloutbus.trainer_adapter.client.core.effects import Result
from rolloutbus.trainer_adapter.client.core.link import Upstream
from rolloutbus.trainer_adapter.client.core.requests import Ask
from rolloutbus.trainer_adapter.client.core.results import Delta, FleetResult
from rolloutbus.trainer_adapter.publisher import publication as publication_module
from rolloutbus.trainer_adapter.publisher.collective import CollectiveOffering
from rolloutbus.trainer_adapter.publisher.publication import (
    STORE_TRIES,
    AssignedVersion,
    Policy,
    Publication,
)
from rolloutbus.trainer_adapter.publisher.tensor_source import HeldTensors
from rolloutbus.trainer_adapter.publisher.transfer import UpdateOptions
from rolloutbus.trainer_adapter.publisher.weight_writer import Soundness, WeightWriter
from tests.unit.trainer_adapter.bench import Bench
from tests.unit.trainer_adapter.slow_names import SlowNames


class Trainer:
    """A client whose core is real; the store answers at once, the router never."""

    dialer = None
    bulk = "ipc:///bulk"
    members: Sequence[Member] = ()
    upstream = Upstream("r1", bulk)

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.asked: list[str] = []
        self.updates: asyncio.Queue[asyncio.Future[Result]] = asyncio.Queue()
        """Of each publish_version; the test ends it."""
        self.connection = cast("Connection", self)

    @property
    def fleet(self) -> str:
        return self._bench.core.fleet

    def require_known_fleet(self) -> None:
        self._bench.core.require_known_fleet()

    def require_fleet(self, fleet: str) -> None:
        self._bench.core.require_fleet(fleet)

    def require_home(self) -> None:
        """Any loop will do."""

    def abort(self, rids: Sequence[str]) -> int:
        return len(rids)

    def forget(self, rid: str) -> None:
        """Nothing is kept."""

    def submit(
        self,
        ask: Ask,
        deadline_s: float,
        listener: Callable[[UpdateProgress], None] | None = None,
    ) -> tuple[str, asyncio.Future[Result]]:
        del deadline_s, listener
        self.asked.append(ask.kind)
        update = asyncio.get_running_loop().create_future()
        self.updates.put_nowait(update)
        return "c/1", update

    def ref(self, address: str) -> FleetRef:
        return ActorRef(address, self)

    async def ask(self, command: Command, deadline_s: float) -> Result:
        del deadline_s
        self.asked.append(command.kind)
        is_restore = isinstance(command.body, RestoreVersion)
        answer = VersionRestored(8) if is_restore else Settled(is_committed=False)
        return FleetResult({"store": answer})

    def tell(self, command: Command, deadline_s: float) -> None:
        raise NotImplementedError

    def stream(self, command: Command, deadline_s: float) -> AsyncGenerator[Delta]:
        raise NotImplementedError


class SlowStoreTrainer(Trainer):
    """Its store gives no number before `go` is set."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self.go = asyncio.Event()
        self.is_asked = asyncio.Event()
        self.is_settled = asyncio.Event()

    async def ask(self, command: Command, deadline_s: float) -> Result:
        result = await super().ask(command, deadline_s)
        if isinstance(command.body, RestoreVersion):
            self.is_asked.set()
            await self.go.wait()
        else:
            self.is_settled.set()
        return result


class BusyStoreTrainer(Trainer):
    """Its store answers when `go` is set; who has no patience left by then hears nothing."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self.go = asyncio.Event()
        self.has_ended = asyncio.Event()
        """The request for a number has, well or not."""
        self.is_settled = asyncio.Event()

    async def ask(self, command: Command, deadline_s: float) -> Result:
        self.asked.append(command.kind)
        if not isinstance(command.body, ReserveVersion):
            self.is_settled.set()
            return FleetResult({"store": Settled(is_committed=False)})
        try:
            async with asyncio.timeout(deadline_s):
                await self.go.wait()
        except TimeoutError as error:
            raise DeadlineExceeded("no ending in time") from error
        finally:
            self.has_ended.set()
        return FleetResult({"store": Reserved(8, "another host", "segment", 16)})


class LostStoreTrainer(Trainer):
    """Its store is lost under way; that is known when the deadline has passed, or at once."""

    def __init__(self, bench: Bench, *, waits: bool) -> None:
        super().__init__(bench)
        self._waits = waits

    async def ask(self, command: Command, deadline_s: float) -> Result:
        await super().ask(command, deadline_s)
        if self._waits:
            await asyncio.sleep(deadline_s)
        raise PeerLost("the store is gone")


class LostTensors(HeldTensors):
    """Tensors that a GPU writes late, and that cannot be copied."""

    def __init__(self) -> None:
        super().__init__({"a": torch.zeros(4)})
        self.is_waited_for, self.are_written = threading.Event(), threading.Event()
        self.may_fail = threading.Event()
        self.were_written = False

    def wait_written(self) -> None:
        self.is_waited_for.set()
        self.were_written = self.are_written.wait(15.0)

    def buckets(self) -> Generator[Sequence[torch.Tensor]]:
        assert self.may_fail.wait(30.0)
        raise RuntimeError("the device is lost")
        yield self.held


@pytest.fixture
def trainer(bench: Bench) -> Trainer:
    bench.say("members", Members([], fleet="x"))
    return Trainer(bench)


def _publication(trainer: Trainer, deadline_s: float = 60.0) -> Publication:
    policy = Policy(trainer, "default", None, WeightWriter(), Soundness())
    return Publication(policy, UpdateOptions(deadline_s=deadline_s))


def _moves(bench: Bench, fleet: str, epoch: int) -> None:
    """Another router answers; its fleet is accepted, as a listener of the client may do."""
    bench.apply(bench.core.link_down(bench.clock.now()))
    n_connects = bench.n_connects
    while bench.n_connects == n_connects:
        bench.pass_time(0.05)
    bench.say("welcome", Welcome(epoch, f"r{epoch}", 1, [], fleet=fleet))
    bench.core.accept_fleet()


async def test_a_version_of_the_former_fleet_is_not_settled_at_the_next_one(
    bench: Bench, trainer: Trainer
) -> None:
    async with _publication(trainer) as publication:
        await publication.restore(3)
        _moves(bench, "y", 2)
    assert trainer.asked == ["restore_version"]


async def test_a_version_of_the_former_fleet_is_not_published_at_the_next_one(
    bench: Bench, trainer: Trainer
) -> None:
    async with _publication(trainer) as publication:
        await publication.restore(3)
        _moves(bench, "y", 2)
        with pytest.raises(OtherFleet, match=r"fleet y answers.*before it was x") as caught:
            await publication.publish()
        with pytest.raises(OtherFleet):
            await publication.bulk()
    assert caught.value.outcome == "not_started"
    assert trainer.asked == ["restore_version"]


@pytest.mark.parametrize("fleet", ["x", "r2"])
async def test_a_version_is_settled_where_it_was_reserved(
    bench: Bench, trainer: Trainer, fleet: str
) -> None:
    if fleet == "r2":  # the router learns its fleet's older name after the number was given
        _moves(bench, "r2", 2)
    async with _publication(trainer) as publication:
        await publication.restore(3)
        bench.say("members", Members([], fleet="older" if fleet == "r2" else "x"))
    assert trainer.asked == ["restore_version", "settle_version"]


async def test_a_former_fleet_that_comes_back_has_its_versions_settled(
    bench: Bench, trainer: Trainer
) -> None:
    async with _publication(trainer) as publication:
        await publication.restore(3)
        _moves(bench, "y", 2)
        _moves(bench, "x", 3)
    assert trainer.asked == ["restore_version", "settle_version"]


async def test_an_update_that_the_fleets_end_cuts_off_is_told_as_such(
    bench: Bench, trainer: Trainer
) -> None:
    async with _publication(trainer) as publication:
        await publication.restore(3)
        publishing = asyncio.create_task(publication.publish())
        async with asyncio.timeout(60.0):
            update = await trainer.updates.get()
        _moves(bench, "y", 2)
        update.set_exception(OtherFleet("fleet y answers", outcome="unknown"))
        with pytest.raises(OtherFleet):
            await publishing
    assert trainer.asked == ["restore_version", "publish_version"]


@pytest.mark.parametrize(("waits", "n_tries"), [(False, STORE_TRIES), (True, 1)])
async def test_a_store_is_asked_again_only_before_the_deadline(
    bench: Bench, trainer: Trainer, n_tries: int, *, waits: bool
) -> None:
    trainer = LostStoreTrainer(bench, waits=waits)
    async with _publication(trainer, 0.05 if waits else 60.0) as publication:
        with pytest.raises(PeerLost):
            await publication.restore(3)
    assert trainer.asked == ["restore_version"] * n_tries


async def test_a_number_that_comes_after_the_end_is_given_back(
    bench: Bench, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication_module, "SETTLE_S", 0.01)
    trainer = SlowStoreTrainer(bench)
    async with asyncio.timeout(60.0):
        async with _publication(trainer) as publication:
            restoring = asyncio.create_task(publication.restore(3))
            await trainer.is_asked.wait()
            restoring.cancel()
            await asyncio.wait((restoring,))
        assert trainer.asked == ["restore_version"]  # the store has not answered yet
        trainer.go.set()
        await trainer.is_settled.wait()
    assert trainer.asked == ["restore_version", "settle_version"]


async def test_room_that_the_store_finds_after_the_deadline_is_given_back(
    bench: Bench, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication_module, "SETTLE_S", 0.01)
    trainer = BusyStoreTrainer(bench)
    publication = _publication(trainer, deadline_s=0.05)
    async with asyncio.timeout(30.0):
        with pytest.raises(DeadlineExceeded, match="nothing was published") as caught:
            async with publication:
                await publication.write(HeldTensors({"a": torch.zeros(4)}))
        assert caught.value.outcome == "not_started"
        assert trainer.asked == ["reserve_version"]  # the store has not answered yet
        trainer.go.set()
        await trainer.has_ended.wait()
    async with asyncio.timeout(5.0):
        await trainer.is_settled.wait()
    assert trainer.asked == ["reserve_version", "settle_version"]


async def test_a_name_that_is_looked_up_slowly_does_not_put_the_deadline_off(
    bench: Bench, trainer: Trainer, slow_names: SlowNames
) -> None:
    trainer = BusyStoreTrainer(bench)
    trainer.go.set()
    offering = CollectiveOffering(host=slow_names.HOST)  # which has a minute
    offerings = {"collective": offering}
    policy = Policy(trainer, "default", None, WeightWriter(), Soundness(), offerings)
    options = UpdateOptions(transport="collective", deadline_s=0.5)
    async with asyncio.timeout(30.0):
        with pytest.raises(DeadlineExceeded, match="nothing was published"):
            async with Publication(policy, options) as publication:
                await publication.write(HeldTensors({"a": torch.zeros(4)}))
        await slow_names.asked()
    assert trainer.asked == ["reserve_version", "settle_version"]


def _collective(bench: Bench, offering: CollectiveOffering) -> Publication:
    trainer = BusyStoreTrainer(bench)
    trainer.go.set()
    offerings = {"collective": offering}
    policy = Policy(trainer, "default", None, WeightWriter(), Soundness(), offerings)
    return Publication(policy, UpdateOptions(transport="collective", deadline_s=60.0))


async def test_a_copy_that_fails_ends_a_publication_whatever_its_offering_waits_for(
    bench: Bench, slow_names: SlowNames
) -> None:
    offering = CollectiveOffering(host=slow_names.HOST, timeout_s=15.0)
    source = LostTensors()
    source.are_written.set()
    async with asyncio.timeout(30.0), _collective(bench, offering) as publication:
        writing = asyncio.create_task(publication.write(source))
        await slow_names.asked()
        source.may_fail.set()
        with pytest.raises(RuntimeError, match="the device is lost"):
            await writing
    assert "no answer within 15 s" not in offering.problem  # it was not waited for


async def test_the_event_loop_goes_on_while_an_offering_waits_for_what_a_gpu_writes(
    bench: Bench,
) -> None:
    source = LostTensors()
    async with asyncio.timeout(30.0), _collective(bench, CollectiveOffering()) as publication:
        writing = asyncio.create_task(publication.write(source))
        assert await asyncio.to_thread(source.is_waited_for.wait, 20.0)
        source.are_written.set()
        source.may_fail.set()
        with pytest.raises(RuntimeError, match="the device is lost"):
            await writing
    assert source.were_written


async def test_a_number_that_comes_after_the_deadline_is_not_the_latest(
    bench: Bench, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication_module, "SETTLE_S", 0.01)
    trainer = BusyStoreTrainer(bench)
    policy = Policy(trainer, "default", None, WeightWriter(), Soundness())
    publication = Publication(policy, UpdateOptions(deadline_s=0.05))
    async with asyncio.timeout(30.0):
        with pytest.raises(DeadlineExceeded):
            async with publication:
                await publication.write(HeldTensors({"a": torch.zeros(4)}))
        newer = AssignedVersion(9, "x")
        policy.latest.append(newer)  # the next publication was faster
        trainer.go.set()
        await trainer.is_settled.wait()
    assert [*policy.latest] == [newer]
