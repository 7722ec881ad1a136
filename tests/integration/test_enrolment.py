"""A token becomes a key that is let in: once, in time, by its own router; and nobody else's."""

import asyncio
import fcntl
import os
import stat
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import pytest_asyncio

import rolloutbus
from rolloutbus.bus.actor.process import read_ready
from rolloutbus.bus.security.invites import KeyList, read_token, with_invite
from rolloutbus.bus.security.key_files import (
    edit_key_list,
    read_allow_list,
    read_key_list,
    read_key_pair,
    router_addresses_beside,
    write_public_key,
)
from rolloutbus.bus.security.principals import Principal
from rolloutbus.bus.security.zmq_curve import Dialer, pair_of_secret
from rolloutbus.bus.transport.endpoints import split_key, with_key
from rolloutbus.bus.transport.zmq_ports import DealerPort
from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import PeerLost, Refused, SettingsError
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.membership import Enrol, Enrolled, Hello
from rolloutbus.launcher.joining import join, new_invitation
from rolloutbus.launcher.plan import environment, python
from rolloutbus.router.actor import RouterActor
from rolloutbus.router.settings import PairSettings, RouterSettings
from tests.integration.key_directory import KeyDirectory
from tests.integration.live_fleet import DEADLINE_S, START_S, quiet_addresses

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ANY = "tcp://127.0.0.1:0"
SECOND = ("tcp://127.0.0.1:7779", "tcp://127.0.0.1:7780")
"""Frontend and backend of a standby that is not there."""


class Running:
    """A guarded router, and the directory of its keys."""

    def __init__(self, keys: KeyDirectory, router: RouterActor) -> None:
        self.keys = keys
        self.router = router

    def invite(
        self, name: str, address: str = "", *, for_s: float = 600.0, role: str = "client"
    ) -> str:
        """A token; without an address for this router."""
        rights = Principal("0" * 64, name, role)  # type: ignore[arg-type]
        where, expires_at = address or self.router.endpoints[0], int(time.time() + for_s)
        token, invite = new_invitation(self.keys.allow_list, rights, expires_at, where)
        edit_key_list(self.keys.allow_list, lambda listed: with_invite(listed, invite))
        return token

    def names(self) -> list[str]:
        """Names of those who are let in."""
        return [each.name for each in read_allow_list(self.keys.allow_list)]


@pytest_asyncio.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    keys = KeyDirectory(tmp_path)
    write_public_key(tmp_path / "router.pub", keys.make_unlisted("router"))
    settings = RouterSettings(ANY, ANY, security=keys.server_settings("router"))
    async with RouterActor(settings, "a" * 32) as router:
        yield Running(keys, router)


def keys_in(directory: Path) -> list[Path]:
    return list(directory.glob("*.key"))


async def code_of(token: str, directory: Path) -> str:
    with pytest.raises(Refused) as caught:
        await join(token, directory, DEADLINE_S)
    assert not keys_in(directory)
    return caught.value.code


async def test_a_new_host_gets_a_key_that_is_let_in_and_all_that_goes_with_it(
    running: Running, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    joined = await join(running.invite("ann"), there, DEADLINE_S)
    assert (joined.name, joined.role, joined.key_file) == ("ann", "client", there / "ann.key")
    assert stat.S_IMODE(joined.key_file.stat().st_mode) == 0o600
    assert router_addresses_beside(joined.key_file).frontend == joined.address
    # The router's own public key lies beside it.
    async with rolloutbus.connect(joined.address, key_file=joined.key_file) as client:
        assert (await client.status()).workers == []


async def test_a_token_is_good_once_and_the_one_who_comes_late_is_told_whose_key_it_let_in(
    running: Running, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    token = running.invite("ann")
    joined = await join(token, tmp_path / "there", DEADLINE_S)
    assert await code_of(token, tmp_path / "elsewhere") == "invite_used"
    assert running.names() == ["ann"]
    told = capfd.readouterr().err
    assert f"the client's key {read_key_pair(joined.key_file).public} is let in" in told
    assert "refused: invite_used" in told


async def test_joining_again_on_the_same_host_is_the_same_join(
    running: Running, tmp_path: Path
) -> None:
    token = running.invite("ann")
    joined = await join(token, tmp_path / "there", DEADLINE_S)
    assert await join(token, tmp_path / "there", DEADLINE_S) == joined
    assert running.names() == ["ann"]


async def test_two_hosts_that_race_for_one_token_are_one_that_joins(
    running: Running, tmp_path: Path
) -> None:
    token = running.invite("ann")
    tries = [join(token, tmp_path / f"there-{n}", DEADLINE_S) for n in range(4)]
    ends = await asyncio.gather(*tries, return_exceptions=True)
    codes = [each.code for each in ends if isinstance(each, Refused)]
    assert codes == ["invite_used"] * 3
    assert running.names() == ["ann"]


async def test_a_token_that_has_expired_is_refused_here_and_by_the_router(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = running.invite("ann", for_s=-1.0)
    assert await code_of(token, tmp_path / "there") == "invite_expired"
    # A host whose clock is late asks the router, which goes by its own.
    late = SimpleNamespace(time=lambda: 0.0)
    monkeypatch.setattr("rolloutbus.launcher.joining.time", late)
    assert await code_of(token, tmp_path / "there") == "invite_expired"


async def test_an_invitation_that_was_withdrawn_lets_nobody_in(
    running: Running, tmp_path: Path
) -> None:
    token = running.invite("ann")
    edit_key_list(running.keys.allow_list, lambda listed: KeyList(listed.principals))
    assert await code_of(token, tmp_path / "there") == "invite_unknown"


async def test_a_token_for_another_router_is_not_answered_by_this_one(
    running: Running, tmp_path: Path
) -> None:
    token = read_token(running.invite("ann"))
    address = running.router.endpoints[0].partition("#")[0]
    other = type(token)(
        token.secret, b"\1" * 32, token.expires_at, "ann", "client", address, address
    )
    said = ""
    async with asyncio.timeout(DEADLINE_S):
        while "not hold the router's key" not in said:  # a link that is late tells nothing yet
            with pytest.raises(PeerLost) as caught:
                await join(other.text(), tmp_path / "there", 1.0)
            said = str(caught.value)
    assert said.endswith("Ask for another token")


async def test_keys_of_another_fleet_are_not_mixed_with_this_one(
    running: Running, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    write_public_key(there / "router.pub", "ab" * 32)
    with pytest.raises(SettingsError, match="another --dir"):
        await join(running.invite("ann"), there, DEADLINE_S)


async def answers_to(text: str, *entries: Entry) -> list[object]:
    """What the router answers to these, sent at once by whoever holds a token."""
    token = read_token(text)
    answers: asyncio.Queue[Entry] = asyncio.Queue()

    def heard(entries: list[Entry]) -> None:
        for each in entries:
            answers.put_nowait(each)

    dialer = Dialer(pair_of_secret("x", token.secret), [token.router_key.hex()])
    port = DealerPort(token.address, heard, dialer=dialer)
    try:
        for each in entries:
            port.send(each)
        async with asyncio.timeout(DEADLINE_S):
            return [unpack(await answers.get()) for _ in entries]
    finally:
        port.close()


async def test_who_holds_an_invitation_cannot_keep_the_router_busy_with_its_file(
    running: Running,
) -> None:
    asked = [Entry("enrol", f"enrol/{n}", body=pack(Enrol(f"{n:064x}"))) for n in range(100)]
    first, *others = await answers_to(running.invite("ann"), *asked)
    assert isinstance(first, Enrolled)
    assert {each.code for each in others if isinstance(each, Problem)} == {"busy"}


async def test_who_holds_an_invitation_may_do_nothing_else(running: Running) -> None:
    hello = Entry("hello", "r/1", body=pack(Hello("client", "ann", "c" * 32)))
    (problem,) = await answers_to(running.invite("ann", role="admin"), hello)
    assert isinstance(problem, Problem)
    assert problem.code == "forbidden"
    assert running.names() == []
    assert running.router.core.context.clients.named("ann") is None


async def test_a_list_that_cannot_be_written_lets_nobody_in_and_the_token_stays_good(
    running: Running, tmp_path: Path
) -> None:
    token = running.invite("ann")
    lock = running.keys.allow_list.with_name(".allow.json.lock")
    lock.unlink()
    lock.mkdir()
    assert await code_of(token, tmp_path / "there") == "enrolment_failed"
    lock.rmdir()
    assert (await join(token, tmp_path / "there", DEADLINE_S)).name == "ann"
    (invite,) = read_key_list(running.keys.allow_list).invites
    assert invite.used_by


async def test_a_list_that_somebody_edits_is_waited_for_and_the_router_goes_on(
    running: Running, tmp_path: Path
) -> None:
    token = running.invite("ann")
    lock = os.open(running.keys.allow_list.with_name(".allow.json.lock"), os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    joining = asyncio.create_task(join(token, tmp_path / "there", DEADLINE_S))
    running.keys.make_unlisted("bob")
    with pytest.raises(PeerLost):  # the router answers others meanwhile: this key is unknown
        await rolloutbus.connect(
            running.router.endpoints[0], key_file=running.keys.file("bob")
        ).open()
    assert not joining.done()
    os.close(lock)
    assert (await joining).name == "ann"


async def test_a_new_host_that_asks_the_standby_first_is_let_in_by_the_active_router(
    running: Running, tmp_path: Path
) -> None:
    address = running.router.endpoints[0]
    pair = PairSettings(address, is_first=False, takeover_s=DEADLINE_S)
    security = running.keys.server_settings("router")
    standby = RouterSettings(ANY, ANY, pair=pair, security=security)
    async with RouterActor(standby, "b" * 32) as second:
        both = f"{second.endpoints[0]},{address}"
        joined = await join(running.invite("ann", both), tmp_path / "there", DEADLINE_S)
        assert joined.address == ",".join(each.partition("#")[0] for each in both.split(","))
        async with rolloutbus.connect(joined.address, key_file=joined.key_file) as client:
            assert client.connection.address == address.partition("#")[0]


async def test_a_token_for_two_routers_needs_one_key_for_both(running: Running) -> None:
    with pytest.raises(SettingsError, match="give the router and its standby the same"):
        running.invite("ann", f"tcp://127.0.0.1:7#{'ab' * 32},tcp://127.0.0.1:8#{'cd' * 32}")


async def test_a_host_that_joined_follows_a_router_to_its_new_key_when_it_is_brought_that(
    tmp_path: Path,
) -> None:
    keys = KeyDirectory(tmp_path)
    old, new = keys.make_unlisted("router"), keys.make_unlisted("later")
    front, back = quiet_addresses(2)
    async with RouterActor(
        RouterSettings(front, back, security=keys.server_settings("router")), "a" * 32
    ) as first:
        token = Running(keys, first).invite("ann", f"{front}#{old}")
        joined = await join(token, tmp_path / "there", DEADLINE_S)
        client = await rolloutbus.connect(front, key_file=joined.key_file).open()
    later = RouterSettings(front, back, security=keys.server_settings("later"))
    async with RouterActor(later, "b" * 32):
        write_public_key(joined.key_file.with_name("router.pub"), new)
        assert (await client.status(deadline_s=DEADLINE_S)).instance == "b" * 32
        await client.close()


@pytest.mark.parametrize("role", ["worker", "trainer"])
async def test_invitations_bring_the_addresses_of_the_standby_along(
    tmp_path: Path, role: str
) -> None:
    keys = KeyDirectory(tmp_path)
    public = keys.add("router", "admin")
    write_public_key(tmp_path / "router.pub", public)
    settings = RouterSettings(
        ANY,
        ANY,
        pair=PairSettings(with_key(SECOND[0], public), is_first=True, other_backend=SECOND[1]),
        security=keys.server_settings("router"),
    )
    text = msgspec.json.encode(settings).decode()
    process = await asyncio.create_subprocess_exec(
        *python("rolloutbus.router"), "--settings-json", text, stdout=PIPE, env=environment()
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            while (first := read_ready(line := await process.stdout.readline())) is None:
                assert line, "it ended before it was ready"
    finally:
        process.kill()
        await process.wait()
    rights = Principal("0" * 64, "host-b", role)  # type: ignore[arg-type]
    token, _ = new_invitation(keys.allow_list, rights, int(time.time()) + 60, "")
    what, second = ("backend", SECOND[1]) if role == "worker" else ("frontend", SECOND[0])
    assert read_token(token).address == f"{split_key(first[what])[0]},{second}"
