"""The client's shells over real sockets, against a router and a worker played by the test."""

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import xxhash

from rolloutbus.bus.transport.zmq_topics import PubPort
from rolloutbus.bus.wire.codec import pack, topic_of, unpack
from rolloutbus.bus.wire.entry import Attempt, Entry
from rolloutbus.bus.wire.errors import ActorStopped, LocalProtocolError, PeerLost, Refused
from rolloutbus.bus.wire.messages.control import FleetOutcome, FleetStatus, Status, WorkerOutcome
from rolloutbus.bus.wire.messages.endings import Accepted, Done
from rolloutbus.bus.wire.messages.generation import (
    Abort,
    Aborted,
    Deltas,
    Generate,
    Generated,
    OpenedSession,
    SamplingParams,
)
from rolloutbus.bus.wire.messages.membership import Lease, Member, Welcome
from rolloutbus.replay.stream.events import Tokens
from rolloutbus.replay.subscriber import subscribe
from rolloutbus.trainer_adapter.client.client import RolloutClient, connect
from rolloutbus.trainer_adapter.client.core.results import Rollout, RolloutCancelled
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from rolloutbus.trainer_adapter.client.sync_client import connect_sync
from tests.integration.live_fleet import DEADLINE_S
from tests.integration.pretend_router import PretendRouter

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ATTEMPT: Attempt = (1, 1)


class PretendFleet:
    """Router and worker in one: token i of a rollout is prompt[0] + i; a step per loop tick.

    Prompts that begin with 13 are sampled one token at a time until they are aborted.
    """

    def __init__(self, folder: Path) -> None:
        self._router = PretendRouter(folder, self._answers)
        self._pub = PubPort(f"ipc://{folder}/stream")
        self.address = self._router.address
        self.stream_endpoint = self._pub.endpoint
        self.aborted: set[str] = set()
        self.something_aborted = asyncio.Event()
        self.goodbye = asyncio.Event()
        self.endless_began = asyncio.Event()
        self._endless: dict[str, int] = {}

    def close(self) -> None:
        self._router.close()
        self._pub.close()

    def _answers(self, entry: Entry) -> list[Entry]:
        match entry.kind:
            case "hello":
                member = Member("w0", "b.1", self.stream_endpoint, "live", 0, "default")
                return [Entry("welcome", body=pack(Welcome(1, "r", 1, [member])))]
            case "client_beat":
                return [Entry("lease", body=pack(Lease(1, "r", 1)))]
            case "generate":
                return self._generate(entry)
            case "abort":
                aborted = Entry("finished", entry.rid, body=pack(Aborted(1)))
                return [*self._abort(cast("Abort", unpack(entry))), aborted]
            case "status":
                status = FleetStatus(1, "r", False, [], {}, 0, 0, 1, {})  # noqa: FBT003
                return [Entry("finished", entry.rid, body=pack(status))]
            case "open_session":
                return [Entry("finished", entry.rid, body=pack(OpenedSession("w0")))]
            case "close_session":
                return [Entry("finished", entry.rid, body=pack(Done()))]
            case "pause" | "resume":
                outcome = FleetOutcome([WorkerOutcome("w0", "finished", pack(Done()))], [])
                return [Entry("finished", entry.rid, body=pack(outcome))]
            case "goodbye":
                self.goodbye.set()
                return []
            case _:
                return []

    def _generate(self, entry: Entry) -> list[Entry]:
        body = cast("Generate", unpack(entry))
        first = int(np.frombuffer(body.prompt, "<i4")[0])
        accepted = Entry("accepted", route="w0", body=pack(Accepted([(entry.rid, ATTEMPT)])))
        if first == 13:
            self._endless[entry.rid] = 0
            self.endless_began.set()
            self._step(entry.rid)
            return [accepted]
        tokens = np.arange(first, first + body.sampling.max_new_tokens, dtype="<i4")
        self._publish(entry.rid, 0, tokens)
        return [accepted, self._ending("finished", entry.rid, tokens, "length")]

    def _step(self, rid: str) -> None:
        if rid not in self._endless:
            return
        n_tokens = self._endless[rid]
        self._publish(rid, n_tokens, np.array([13 + n_tokens], "<i4"))
        self._endless[rid] += 1
        asyncio.get_running_loop().call_later(0.002, self._step, rid)

    def _abort(self, body: Abort) -> list[Entry]:
        endings: list[Entry] = []
        for rid in list(self._endless) if body.everything else body.rids:
            self.aborted.add(rid)
            n_tokens = self._endless.pop(rid, None)
            if n_tokens is not None:
                tokens = np.arange(13, 13 + n_tokens, dtype="<i4")
                endings.append(self._ending("cancelled", rid, tokens, "abort"))
        self.something_aborted.set()
        return endings

    def _publish(self, rid: str, seq: int, tokens: np.ndarray) -> None:
        body = Deltas(
            [rid], [ATTEMPT], [seq], [len(tokens)], tokens.tobytes(), _logprobs(tokens), [0]
        )
        entry = Entry("deltas", epoch="b.1", route="w0", body=pack(body))
        self._pub.publish(topic_of(rid.split("/", maxsplit=1)[0]), entry)

    @staticmethod
    def _ending(kind: str, rid: str, tokens: np.ndarray, reason: str) -> Entry:
        body = Generated(
            tokens=tokens.tobytes(),
            logprobs=_logprobs(tokens),
            versions=[(0, len(tokens))],
            finish_reason=msgspec.convert(reason, Generated.__annotations__["finish_reason"]),
            digest=xxhash.xxh3_64_intdigest(tokens.tobytes()),
            n_prompt_tokens=1,
        )
        return Entry(kind, rid, ATTEMPT, "b.1", "w0", body=pack(body))


def _logprobs(tokens: np.ndarray) -> bytes:
    return (-tokens.astype("<f4") / 100).tobytes()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[PretendFleet]:
    fleet = PretendFleet(tmp_path)
    yield fleet
    fleet.close()


@pytest.fixture
async def client(fleet: PretendFleet) -> AsyncIterator[RolloutClient]:
    async with asyncio.timeout(DEADLINE_S), connect(fleet.address, name="trainer") as client:
        yield client


async def test_generate_returns_arrays(client: RolloutClient) -> None:
    rollout = await client.generate([5, 1, 2], SamplingParams(max_new_tokens=4))
    assert rollout.tokens.tolist() == [5, 6, 7, 8]
    assert rollout.logprobs.tolist() == pytest.approx([-0.05, -0.06, -0.07, -0.08])


async def test_a_batch_comes_back_in_order_as_one_group_per_prompt(client: RolloutClient) -> None:
    prompts = [[100 * n] for n in range(1, 9)]
    groups = await client.generate_batch(prompts, SamplingParams(max_new_tokens=3), n=4)
    assert [len(group) for group in groups] == [4] * 8
    for prompt, group in zip(prompts, groups, strict=True):
        assert {tuple(rollout.tokens.tolist()) for rollout in group} == {
            (prompt[0], prompt[0] + 1, prompt[0] + 2)
        }
    assert len({rollout.rid for group in groups for rollout in group}) == 32


async def test_a_misspelt_policy_is_warned_of_at_once(
    client: RolloutClient, caplog: pytest.LogCaptureFixture
) -> None:
    await client.generate([1, 2, 3], SamplingParams(max_new_tokens=2))
    assert caplog.messages == []
    await client.generate([1, 2, 3], SamplingParams(max_new_tokens=2), policy="defualt")
    (told,) = caplog.messages
    assert told.startswith("no worker of policy 'defualt' is here, its requests wait")
    assert told.endswith("there are workers of default; did you mean 'default'?")


async def test_a_batch_that_returns_errors_tells_each_rows_ending(
    fleet: PretendFleet, client: RolloutClient
) -> None:
    few = SamplingParams(max_new_tokens=3)
    prompts = [[100], [13], [], [200]]
    batch = asyncio.create_task(
        client.generate_batch(prompts, few, n=2, on_error="return", deadline_s=DEADLINE_S)
    )
    await fleet.endless_began.wait()
    await client.abort()
    first, stopped, refused, last = await batch
    assert [row.tokens.tolist() for row in first if isinstance(row, Rollout)] == 2 * [
        [100, 101, 102]
    ]
    assert [row.tokens[0] for row in last if isinstance(row, Rollout)] == [200, 200]
    assert [row.partial.finish_reason for row in stopped if isinstance(row, RolloutCancelled)] == (
        ["abort", "abort"]
    )
    assert [row.field for row in refused if isinstance(row, Refused)] == ["prompt", "prompt"]


async def test_a_batch_may_keep_what_was_sampled_of_aborted_rows(
    fleet: PretendFleet, client: RolloutClient
) -> None:
    few = SamplingParams(max_new_tokens=3)
    batch = asyncio.create_task(
        client.generate_batch([[100], [13]], few, on_abort="partial", deadline_s=DEADLINE_S)
    )
    await fleet.endless_began.wait()
    await client.abort()
    [whole], [stopped] = await batch
    assert (whole.finish_reason, stopped.finish_reason) == ("length", "abort")
    held = stopped.tokens.tolist()
    assert held == list(range(13, 13 + len(held)))


async def test_rows_that_fail_together_leave_no_error_that_nobody_reads(
    fleet: PretendFleet, client: RolloutClient
) -> None:
    unread: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context))
    batch = asyncio.create_task(client.generate_batch([[13]] * 20, SamplingParams()))
    await fleet.endless_began.wait()
    await client.abort()
    [error] = await asyncio.gather(batch, return_exceptions=True)
    assert isinstance(error, RolloutCancelled)
    del batch, error  # its traceback holds the rows
    await asyncio.sleep(0)  # so does the loop, until its next turn
    gc.collect()
    assert unread == []


async def test_a_batch_raises_the_first_error_unless_told_otherwise(client: RolloutClient) -> None:
    with pytest.raises(Refused) as caught:
        await client.generate_batch([[100], []], SamplingParams(max_new_tokens=3))
    assert caught.value.field == "prompt"


async def test_thousands_of_requests_run_side_by_side(client: RolloutClient) -> None:
    groups = await client.generate_batch([[n] for n in range(20, 270)], SamplingParams(), n=8)
    assert sum(len(group) for group in groups) == 2000


async def test_a_stream_is_the_rollout(client: RolloutClient) -> None:
    deltas = [delta async for delta in client.stream([5], SamplingParams(max_new_tokens=6))]
    assert np.concatenate([delta.tokens for delta in deltas]).tolist() == [5, 6, 7, 8, 9, 10]
    assert [delta.finish_reason for delta in deltas][-1] == "length"


async def test_leaving_a_stream_aborts_its_request(
    fleet: PretendFleet, client: RolloutClient
) -> None:
    held: list[int] = []
    async for delta in client.stream([13], SamplingParams()):
        held += delta.tokens.tolist()
        if len(held) >= 5:
            break
    async with asyncio.timeout(DEADLINE_S):
        await fleet.something_aborted.wait()
    assert held == list(range(13, 13 + len(held)))


async def test_cancelling_a_waiting_call_aborts_its_request(
    fleet: PretendFleet, client: RolloutClient
) -> None:
    task = asyncio.create_task(client.generate([13], SamplingParams()))
    await asyncio.sleep(0)  # the call submits in its first turn
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(DEADLINE_S):
        await fleet.something_aborted.wait()


async def test_abort_ends_a_rollout_with_what_was_sampled(client: RolloutClient) -> None:
    task = asyncio.create_task(client.generate([13], SamplingParams()))
    await asyncio.sleep(0)  # the call submits in its first turn
    assert await client.abort() == 1
    with pytest.raises(RolloutCancelled) as caught:
        await task
    assert caught.value.partial.finish_reason == "abort"


async def test_abort_takes_one_rid_as_it_is(client: RolloutClient) -> None:
    first, second = (client.stream([13], SamplingParams()) for _ in range(2))
    rid = (await anext(first)).rid
    spared = (await anext(second)).rid
    assert await client.abort(rid) == 1
    with pytest.raises(RolloutCancelled):
        async for _ in first:
            pass
    assert await client.abort(rid) == 0, "it has ended, which is no mistake"
    assert (await anext(second)).rid == spared
    assert await client.abort([spared]) == 1
    with pytest.raises(RolloutCancelled):
        async for _ in second:
            pass


@pytest.mark.parametrize("wrong", ["nonsense", "shell/1", "", "*"])
async def test_rid_that_was_never_asked_for_is_said_and_others_are_stopped(
    client: RolloutClient, wrong: str
) -> None:
    with pytest.raises(Refused) as caught:
        await client.abort(wrong)
    assert (caught.value.code, caught.value.field) == ("unknown_request", "rids")
    assert repr(wrong) in str(caught.value)
    stream = client.stream([13], SamplingParams())
    rid = (await anext(stream)).rid
    with pytest.raises(Refused, match="1 of 2 are no requests of this client"):
        await client.abort([wrong, rid])
    with pytest.raises(RolloutCancelled):
        async for _ in stream:
            pass


async def test_control_commands_return_typed_results(client: RolloutClient) -> None:
    paused = await client.pause("drain")
    assert paused.by_worker == {"w0": Done()}
    assert (await client.resume(target="w0")).silent == []
    assert (await client.status()).router_epoch == 1
    async with client.session("conversation") as session:
        assert (session.name, session.worker) == ("conversation", "w0")


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ([], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([2**31], {}, "prompt"),
        ([[1, 2]], {}, "prompt"),
        ([1.5], {}, "prompt"),
        ([1], {"versions": "newest"}, "versions"),
        ([1], {"priority": 1000}, "place.priority"),
        ([1], {"session": "no spaces"}, "place.session"),
    ],
)
async def test_bad_input_is_refused_and_the_field_named(
    client: RolloutClient, prompt: list[int], options: dict[str, str], field: str
) -> None:
    with pytest.raises(Refused) as caught:
        await client.generate(prompt, SamplingParams(), **options)  # type: ignore[arg-type]
    assert caught.value.field is not None
    assert caught.value.field.endswith(field.removeprefix("place."))


async def test_leaving_the_client_ends_its_callers_and_says_goodbye(fleet: PretendFleet) -> None:
    async with asyncio.timeout(DEADLINE_S):
        async with connect(fleet.address) as client:
            task = asyncio.create_task(client.generate([13], SamplingParams()))
            await asyncio.sleep(0)  # the call submits in its first turn
        with pytest.raises(ActorStopped):
            await task
        await fleet.goodbye.wait()
        with pytest.raises(ActorStopped):
            await client.generate([5], SamplingParams())


async def test_a_session_samples_between_its_opening_and_its_closing(client: RolloutClient) -> None:
    session = client.session("conversation")
    session.append([5])
    with pytest.raises(Refused, match="not open yet"):
        await session.sample(SamplingParams(max_new_tokens=2))
    async with session:
        await session.sample(SamplingParams(max_new_tokens=2))
    for late in (
        lambda: session.sample(SamplingParams()),
        lambda: session.generate([5], SamplingParams()),
        lambda: anext(session.sample_stream(SamplingParams())),
        session.renew,
    ):
        with pytest.raises(Refused, match="is closed: branch from it") as caught:
            await late()
        assert caught.value.field == "session"
    async with session.branch("another") as other:
        assert other.transcript.tokens.tolist() == [5, 5, 6]


async def test_a_client_opens_and_closes_without_a_block(fleet: PretendFleet) -> None:
    client = await connect(fleet.address).open()
    with pytest.raises(LocalProtocolError, match="open already"):
        await client.open()
    assert (await client.generate([5], SamplingParams(max_new_tokens=1))).tokens.tolist() == [5]
    session = await client.session("conversation").open()
    session.close()
    await client.close()
    await client.close()
    async with asyncio.timeout(DEADLINE_S):
        await fleet.goodbye.wait()
    with pytest.raises(ActorStopped, match="the client is closed"):
        await client.status()
    with pytest.raises(LocalProtocolError, match="connect another one"):
        await client.open()


async def test_a_forked_child_is_told_whose_client_it_has(fleet: PretendFleet) -> None:
    plain = await asyncio.to_thread(connect_sync(fleet.address).open)
    async with connect(fleet.address) as client:
        theirs, ours = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                for call in (plain.status, lambda: client.ref().tell(Status(), deadline_s=1.0)):
                    try:
                        call()
                    except ActorStopped as error:
                        os.write(ours, f"{error}\n".encode())
                plain.close()
                client.connection.close()
                os.write(ours, b"closed\n")
            finally:
                os._exit(0)  # whatever happens: what follows is the parent's
        os.close(ours)
        with open(theirs, encoding="utf-8") as told:  # noqa: ASYNC230, PTH123 - a pipe
            lines = await asyncio.to_thread(told.readlines)
        await asyncio.to_thread(os.waitpid, child, 0)
        assert lines[2:] == ["closed\n"]
        assert [f"belongs to process {os.getpid()}" in line for line in lines[:2]] == [True, True]
        assert (await client.status()).router_epoch == 1
        await asyncio.to_thread(plain.status)
    await asyncio.to_thread(plain.close)


async def test_several_threads_may_close_a_blocking_client_at_once(fleet: PretendFleet) -> None:
    for _ in range(20):
        plain = await asyncio.to_thread(connect_sync(fleet.address).open)
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(asyncio.to_thread(plain.close) for _ in range(4)))
        with pytest.raises(ActorStopped, match="the client is closed"):
            plain.status()


async def test_a_listener_cannot_close_its_blocking_client_which_stays_open(
    fleet: PretendFleet,
) -> None:
    plain = await asyncio.to_thread(connect_sync(fleet.address).open)
    async with asyncio.timeout(DEADLINE_S):

        async def listen() -> None:
            with pytest.raises(LocalProtocolError, match="own thread"):
                plain.close()

        await asyncio.to_thread(plain.run, listen())
        assert (await asyncio.to_thread(plain.status)).router_epoch == 1
        await asyncio.to_thread(plain.close)


async def test_without_a_router_connecting_fails_in_time(tmp_path: Path) -> None:
    settings = ClientSettings(name="c", router=f"ipc://{tmp_path}/none", connect_timeout_s=0.3)
    with pytest.raises(PeerLost, match=r"no router answers at .* `rolloutbus ls` lists"):
        async with RolloutClient(settings):
            pass


async def test_a_subscriber_sees_the_stream_of_another_client(
    fleet: PretendFleet, client: RolloutClient
) -> None:
    told: dict[str, Tokens] = {}
    async with subscribe(fleet.address, clients=["trainer"]) as subscriber:

        async def watch() -> None:
            async for event in subscriber:
                if isinstance(event, Tokens):
                    told[event.rid] = event
                    if len(told) > 3:
                        return

        watching = asyncio.create_task(watch())
        async with asyncio.timeout(DEADLINE_S):
            while not watching.done():  # subscriptions take a moment to reach the publisher
                await client.generate([5], SamplingParams(max_new_tokens=4))
        for event in told.values():
            assert (event.start, event.tokens.tolist()) == (0, [5, 6, 7, 8])
            assert (event.worker, event.attempt, event.version) == ("w0", ATTEMPT, 0)


def test_a_plain_script_uses_the_same_names(tmp_path: Path) -> None:
    started = threading.Event()
    stop: list[Callable[[], None]] = []
    address: list[str] = []

    async def serve() -> None:
        fleet = PretendFleet(tmp_path)
        address.append(fleet.address)
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def finish() -> None:
            loop.call_soon_threadsafe(done.set)

        stop.append(finish)
        started.set()
        await done.wait()
        fleet.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(DEADLINE_S)
    try:
        with connect_sync(address[0], name="script") as client:
            assert client.generate([5], SamplingParams(max_new_tokens=2)).tokens.tolist() == [5, 6]
            assert (
                len(client.generate_batch([[5], [6]], SamplingParams(max_new_tokens=2), n=2)) == 2
            )
            (good,), (bad,) = client.generate_batch(
                [[5], []], [{"max_new_tokens": 2}, {}], seed=[1, 2], on_error="return"
            )
            assert isinstance(good, Rollout)
            assert isinstance(bad, Refused)
            tokens = [
                token
                for delta in client.stream([5], SamplingParams(max_new_tokens=3))
                for token in delta.tokens.tolist()
            ]
            assert tokens == [5, 6, 7]
            futures = [client.submit([n], SamplingParams(max_new_tokens=2)) for n in (5, 50)]
            assert [each.result(DEADLINE_S).tokens[0] for each in futures] == [5, 50]
            stopped = client.submit([13], SamplingParams(max_new_tokens=100))
            assert stopped.cancel()
            unanswered = client.submit([13], SamplingParams(max_new_tokens=100_000))
            assert client.pause().by_worker == {"w0": Done()}
            with client.session("conversation") as session:
                rollout = session.generate([5], SamplingParams(max_new_tokens=3))
                assert (rollout.tokens.tolist(), session.session.worker) == ([5, 6, 7], "w0")
        assert isinstance(unanswered.exception(DEADLINE_S), ActorStopped)
        with pytest.raises(ActorStopped, match="the client is closed"):
            client.generate([5], SamplingParams())
        with pytest.raises(ActorStopped, match="the client is closed"):
            client.submit([5], SamplingParams())
        again = connect_sync(address[0]).open()
        with pytest.raises(LocalProtocolError, match="open already"):
            again.open()
        place = again.session("conversation").open()
        assert place.generate([5], {"max_new_tokens": 1}).tokens.tolist() == [5]
        place.close()
        with pytest.raises(Refused, match="is closed"):
            place.sample(SamplingParams())
        again.close()
        again.close()
    finally:
        stop[0]()
        thread.join()
