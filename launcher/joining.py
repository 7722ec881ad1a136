"""Joining a fleet of another host: tokens, and what a new host makes of one."""

import asyncio
import time
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from rolloutbus.bus.security.invites import Invite, Token, read_token
from rolloutbus.bus.security.key_files import (
    RouterAddresses,
    is_there,
    read_key_pair,
    read_public_key,
    remove_key_pair,
    router_addresses_beside,
    write_key_pair,
    write_public_key,
    write_router_addresses,
)
from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.bus.security.principals import Principal
from rolloutbus.bus.security.zmq_curve import Dialer, new_key_pair, pair_of_secret
from rolloutbus.bus.transport.endpoints import (
    is_wildcard,
    require_routers,
    router_addresses,
    split_key,
    without_keys,
)
from rolloutbus.bus.transport.ports import LinkFailure, sentence_of
from rolloutbus.bus.transport.zmq_ports import DealerPort
from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import PeerLost, Refused, RemoteProtocolError, SettingsError
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.membership import Enrol, Enrolled
from rolloutbus.launcher.plan import private_dir

ROUTER_PUB = "router.pub"
RETRY_S = 0.25
ANSWER_S = 5.0
"""Silence after which the router, or its standby, is asked over a fresh link."""


class _Busy(Refused):
    """Another process edits the router's allow-list: asked again, it answers."""


def new_invitation(
    allow_list: Path, rights: Principal, expires_at: int, address: str
) -> tuple[str, Invite]:
    """A token, and the invitation that the allow-list keeps of it; nothing is written.

    Args:
        allow_list: the file; the router's public key and addresses are looked up beside it.
        rights: of the key to come; `.key` does not matter.
        expires_at: seconds since 1970.
        address: where the new host connects, perhaps with the router's key; empty: as looked up.
            Of a router and its standby both, separated by a comma.

    Raises:
        SettingsError: it is not known where the router listens, or which key it has; or the new
            host could not reach it.
    """
    told, router_key = _address_and_key(address)
    known = router_addresses_beside(allow_list)
    pub = allow_list.absolute().with_name(ROUTER_PUB)
    if not router_key and not is_there(pub):
        raise SettingsError(f"there is no {pub}: say --router tcp://HOST:PORT#KEY, its public key")
    own = new_key_pair("invitation")
    is_member = rights.role in ("worker", "store")
    if told:
        known = RouterAddresses(**{"backend" if is_member else "frontend": told})
    token = Token(
        secret=own.reveal(),
        router_key=bytes.fromhex(router_key or read_public_key(pub)),
        expires_at=expires_at,
        name=rights.name,
        role=rights.role,  # type: ignore[arg-type] - nobody is invited as a newcomer
        frontend=known.frontend,
        backend=known.backend,
    )
    if is_member and known.lacks_a_backend:
        raise SettingsError(
            "the router has a standby: say where the new host reaches the backends of both, "
            "--router tcp://HOST:PORT,tcp://HOST:PORT"
        )
    if not token.address:
        raise SettingsError(
            f"where does the router listen? Start it, with its key beside {allow_list}, or say "
            "--router tcp://HOST:PORT"
        )
    if any(map(is_wildcard, token.address.split(","))):
        raise SettingsError(
            f"the router listens at {token.address}, every interface of its host: say with "
            "--router tcp://HOST:PORT where the new host reaches it"
        )
    its_key = token.router_key.hex()
    require_routers(token.address, SecuritySettings(key_file="later", server_keys=[its_key]))
    invite = Invite(
        own.public,
        expires_at,
        rights.name,
        token.role,
        rights.actors,
        rights.sessions,
        rights.priorities,
    )
    return token.text(), invite


def _address_and_key(address: str) -> tuple[str, str]:
    """(one address or several, the public key that stands in each); both may be empty."""
    if not address:
        return "", ""
    bare, keys = zip(*map(split_key, router_addresses(address)), strict=True)
    if len({*keys}) > 1:
        raise SettingsError(
            "--router: a token holds one key of a router: give the router and its standby the same"
        )
    return ",".join(bare), keys[0]


class Joined(NamedTuple):
    """A key that is let in."""

    key_file: Path
    name: str
    role: str
    address: str
    """Where its owner connects."""


async def join(text: str, directory: Path, deadline_s: float) -> Joined:
    """Make a key pair here and have the router of a token let it in; repeat it if it failed.

    Args:
        text: the token.
        directory: gets `NAME.key`, `NAME.pub`, and the router's key and addresses.
        deadline_s: seconds to wait for the router.

    Raises:
        Refused: the token is malformed, withdrawn, expired or used; `.code` says which.
        PeerLost: no router answers; outcome `unknown`: repeat it with the same token.
        SettingsError: the directory cannot be used, or holds keys of another fleet; or the token's
            name cannot be a file's, or its address nobody's.
    """
    token = read_token(text)
    _check_address(token)
    if time.time() >= token.expires_at:
        why = "this invitation has expired: ask for another one"
        raise Refused(Problem("invite_expired", why, "not_started"))
    file, is_new = _own_key(token, directory)
    try:
        enrolled = await _enrol(token, read_key_pair(file).public, deadline_s)
    except Refused:
        if is_new:
            remove_key_pair(file)
        raise
    _keep_router(token, directory)
    return Joined(file, enrolled.name, enrolled.role, token.address)


def _check_address(token: Token) -> None:
    try:
        router_addresses(token.address)
    except SettingsError as error:
        raise SettingsError(
            f"the token names no address where a router could be: {error}. Have one made that "
            "does: rolloutbus keys invite --router tcp://HOST:PORT"
        ) from error


def _own_key(token: Token, directory: Path) -> tuple[Path, bool]:
    """(file of the pair that is to be let in, whether it had to be made)."""
    pub, file = directory / ROUTER_PUB, directory / f"{token.name}.key"
    try:
        if not is_there(directory):
            private_dir(directory)
    except OSError as error:
        raise SettingsError(f"cannot use {directory}: {error.strerror}") from error
    if is_there(pub) and read_public_key(pub) != token.router_key.hex():
        raise SettingsError(
            f"{pub} is the key of another router than the token's: name another --dir"
        )
    # A pair that is there may be let in already: the answer to an earlier try was lost.
    is_new = not is_there(file)
    if is_new:
        write_key_pair(file, new_key_pair(token.name))
    return file, is_new


def _keep_router(token: Token, directory: Path) -> None:
    try:
        write_public_key(directory / ROUTER_PUB, token.router_key.hex())
        write_router_addresses(directory, RouterAddresses(token.frontend, token.backend))
    except OSError as error:
        raise SettingsError(f"cannot use {directory}: {error.strerror}") from error


async def _enrol(token: Token, key: str, deadline_s: float) -> Enrolled:
    """Ask the router until it answers; a link that failed is made again, to the next address."""
    dialer = Dialer(pair_of_secret("invitation", token.secret), [token.router_key.hex()])
    addresses = router_addresses(token.address)
    failures: dict[str, LinkFailure] = {}
    try:
        async with asyncio.timeout(deadline_s):
            for address in cycle(addresses):
                answer, failures[address] = await _ask_once(address, dialer, key)
                with suppress(_Busy):
                    if answer is not None:
                        return _enrolled_in(answer)
                if list(failures.values()) == ["unknown-key"] * len(addresses):
                    why = "the router does not know this invitation: ask for another one"
                    raise Refused(Problem("invite_unknown", why, "not_started"))
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        pass
    failures = failures or dict.fromkeys(addresses[:1], "no-answer")
    sentences = [_sentence_of(why, each) for each, why in failures.items()]
    is_old = "other-key" in failures.values()
    what_next = "Ask for another token" if is_old else "Repeat it with the same token"
    raise PeerLost(f"{', and '.join(sentences)}; {deadline_s:g} s have passed. {what_next}")


def _sentence_of(why: LinkFailure, address: str) -> str:
    if why == "other-key":  # nobody has brought a file with the key: the token names it
        where = without_keys(address)
        return f"what answers at {where} does not hold the router's key that the token names"
    return sentence_of(why, address, "a newcomer")


async def _ask_once(address: str, dialer: Dialer, key: str) -> tuple[Entry | None, LinkFailure]:
    """The router's answer over a fresh link, or why that link ended without one."""
    ended: asyncio.Future[Entry | None] = asyncio.get_running_loop().create_future()

    def end(answer: Entry | None) -> None:
        if not ended.done():
            ended.set_result(answer)

    port = DealerPort(address, lambda entries: end(entries[0]), lambda: end(None), dialer=dialer)
    try:
        port.send(Entry("enrol", "enrol/1", body=pack(Enrol(key))))
        async with asyncio.timeout(ANSWER_S):
            answer = await ended
    except TimeoutError:
        return None, "no-answer"
    finally:
        port.close()
    if answer is not None and answer.kind == "dismissed":  # no newcomer is told it for its own sake
        return None, "standby"
    return answer, port.failure


def _enrolled_in(answer: Entry) -> Enrolled:
    body = unpack(answer)
    if isinstance(body, Problem):
        raise _Busy(body) if body.code == "busy" else Refused(body)
    if not isinstance(body, Enrolled):
        raise RemoteProtocolError(f"enrol was answered with {answer.kind[:32]!r}")
    return body
