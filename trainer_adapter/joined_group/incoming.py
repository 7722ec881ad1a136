"""Versions that come in over groups of trainers, bucket by bucket, and are published as a whole."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from rolloutbus.bus.weights.manifest import ALIGN_BYTES, bytes_in
from rolloutbus.bus.wire.errors import BusError, Refused
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.weights import TensorForm
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.joined_group.member import JoinedGroup
from rolloutbus.trainer_adapter.joined_group.orders import Bucket, Invitation, PublishRules
from rolloutbus.trainer_adapter.joined_group.tensor_set import TensorSet, plan_of
from rolloutbus.trainer_adapter.publisher.publisher import WeightPublisher
from rolloutbus.trainer_adapter.publisher.transfer import Published

_log = logging.getLogger(__name__)


class Progress(NamedTuple):
    """What has become of an update."""

    policy: str
    """Whose weights these are."""
    sentence: str
    n_in: int
    """Tensors that are in."""
    n_all: int
    published: Published | None = None
    """None while it is not."""


@dataclass(eq=False, slots=True)
class _Update:
    """The version that is coming in for one policy."""

    tensors: TensorSet
    groups: set[str] = field(default_factory=set[str])
    """Groups without which it cannot be: its tensors came over them, or are to come."""
    waits_for_finish: bool = False
    """It is published when it is finished, not as soon as it is complete."""
    problem: str = ""
    """Why nothing can become of it; its tensors are gone."""

    def require_fitting(self, forms: Sequence[TensorForm]) -> None:
        """Raises Refused: these tensors cannot be added."""
        if self.problem:
            raise Refused(Problem("update_in_progress", self.problem, "not_started"))
        problem = self.tensors.problem_of(forms)
        if problem is not None:
            raise Refused(problem)


@dataclass(eq=False, slots=True)
class _Membership:
    """A group, and whose weights come over it."""

    group: JoinedGroup
    policy: str
    forms: Sequence[TensorForm]
    """What a version of that policy must hold."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One bucket after another."""


class IncomingWeights:
    """All groups that one client is in for trainers, and the versions that come over them.

    A policy has one update at a time; its tensors may come over several groups, as those of
    pipeline stages do. It is published whole, with `require="all"`, or not at all.
    """

    def __init__(self, client: RolloutClient) -> None:
        """`client` publishes; its principal must be a trainer."""
        self._client = client
        self._joined: dict[str, _Membership] = {}
        self._joining: set[str] = set()
        self._updates: dict[str, _Update] = {}
        """By policy."""
        self._turns: dict[str, asyncio.Lock] = {}
        """By policy: what was received is judged and published one after another."""

    async def join(self, invitation: Invitation, policy: str, forms: Sequence[TensorForm]) -> None:
        """Become a rank of a trainer's group.

        Args:
            invitation: which group, and as whom.
            policy: whose weights come over it.
            forms: what a version of the policy must hold, as `client.list_weights` tells.

        Raises:
            Refused: there is a group of this name.
            PeerLost, DeadlineExceeded: the group did not come together.
        """
        name = invitation.name
        former = self._joined.get(name)
        if name in self._joining or (former is not None and not former.group.problem):
            message = f"there is a group {name!r} already: destroy it first, or name another"
            raise Refused(bad_request("group_name", message))
        self._joining.add(name)
        try:
            if former is not None:
                await self.leave(name)
            group = await JoinedGroup.join(invitation, partial(self._on_over, name))
            self._joined[name] = _Membership(group, policy, forms)
        finally:
            self._joining.discard(name)

    async def leave(self, name: str) -> str:
        """Leave a group and give up the update that came over it; returns what that was.

        Raises:
            Refused: there is no group of this name.
        """
        member = self._member(name)
        update = self._updates.get(member.policy)
        told = ""
        if update is not None and name in update.groups:
            told = f"; the update is given up: {update.problem or update.tensors.sentence}"
            del self._updates[member.policy]
        del self._joined[name]
        await member.group.end("it was destroyed")
        return f"group {name!r} is left{told}"

    async def receive(
        self, name: str, bucket: Bucket, rules: PublishRules, timeout_s: float
    ) -> Progress:
        """Take a bucket. The one that completes a version publishes it, unless `finish` will.

        A bucket that does not belong to the version is received, refused and forgotten.

        Args:
            name: of the group.
            bucket: what rank 0 broadcasts.
            rules: for the version, should this bucket complete it.
            timeout_s: for everything.

        Raises:
            Refused: the bucket does not belong to the version; `.field` names the tensor.
            PeerLost, DeadlineExceeded: the group is over.
            As `WeightPublisher.publish`: the version is given up.
        """
        began = time.monotonic()
        member = self._member(name)
        plan = plan_of(bucket.forms, bucket.packed_bytes)
        away = "who asked for a bucket went away before"
        async with _its_turn(member.turn, member.group, f"{away} its turn"):
            await self._require_bearable(member, plan.order.size_bytes)
            content = await member.group.receive(plan.order, timeout_s)
            # Rank 0 has sent it, and will not again: without it no version can be.
            waiting = f"{away} it was added to the version"
            async with _its_turn(self._turn(member.policy), member.group, waiting):
                if self._joined.get(name) is not member or member.group.problem:
                    message = f"group {name!r} was left, or lost, before its bucket had its turn"
                    raise Refused(bad_request("group_name", message))
                update = self._updates.get(member.policy) or _Update(TensorSet(member.forms))
                update.require_fitting(bucket.forms)
                update.tensors.add(plan.placed, content)
                update.groups.add(name)
                self._updates[member.policy] = update
                if update.tensors.missing or update.waits_for_finish:
                    return _progress(member.policy, update)
                left_s = max(0.1, began + timeout_s - time.monotonic())
                return await self._publish(member.policy, rules, left_s)

    async def refuse(self, name: str, why: str) -> None:
        """End a group if it is joined here: a bucket that rank 0 sends cannot be received.

        Without a name it is the only group; of several, nobody knows which.
        """
        meant = [name] if name else [*self._joined]
        if len(meant) == 1 and meant[0] in self._joined:
            await self._joined[meant[0]].group.end(f"a bucket was refused: {why}")

    def start(self, policy: str) -> None:
        """Begin an update that is published by `finish`.

        Raises:
            Refused: one is under way, or no group is there for it.
        """
        self.require_none_open(policy)
        members = [each for each in self._joined.values() if each.policy == policy]
        joined = [each for each in members if not each.group.problem]
        if not joined:
            message = f"no trainer's group is joined for policy {policy!r}: begin with that"
            raise Refused(bad_request("policy", message))
        groups = {each.group.name for each in joined}
        tensors = TensorSet(joined[0].forms)
        self._updates[policy] = _Update(tensors, groups, waits_for_finish=True)

    def require_started_over(self, name: str) -> None:
        """Raises Refused: no update that waits for `finish` can come over this group."""
        self._started(self._member(name).policy)

    async def finish(self, policy: str, rules: PublishRules, timeout_s: float) -> Progress:
        """Publish what came since `start`.

        Raises:
            Refused: none was started, or a tensor is missing: then the update is given up.
            As `WeightPublisher.publish`: the version is given up.
        """
        async with self._turn(policy):
            update = self._started(policy)
            if update.problem or update.tensors.missing:
                del self._updates[policy]
                why = update.problem or update.tensors.sentence
                message = f"the update is given up, the fleet keeps its version: {why}"
                raise Refused(Problem("bad_request", message, "not_started"))
            return await self._publish(policy, rules, timeout_s)

    def require_none_open(self, policy: str = "") -> None:
        """Check that no update waits for tensors.

        Args:
            policy: whose; empty: all.

        Raises:
            Refused: `update_in_progress`.
        """
        for name, update in self._updates.items():
            if policy in ("", name):
                groups = ", ".join(sorted(update.groups))
                message = (
                    f"an update of policy {name!r} is not complete: "
                    f"{update.problem or update.tensors.sentence}. Send the rest, or give it up by "
                    f"destroying the group that it comes over ({groups})"
                )
                raise Refused(Problem("update_in_progress", message, "not_started"))

    async def close(self) -> None:
        """Leave all groups."""
        for name in [*self._joined]:
            await self.leave(name)

    async def _publish(self, policy: str, rules: PublishRules, timeout_s: float) -> Progress:
        """Publish the update of a policy, which is complete; it is over in any case."""
        update = self._updates.pop(policy)  # its groups may end now
        publisher = WeightPublisher(self._client, policy)
        try:
            async with publisher.begin(
                require="all",
                in_flight=rules.in_flight,
                allow_zeros=rules.allow_zeros,
                deadline_s=timeout_s,
            ) as publishing:
                tensors = update.tensors
                await publishing.put_all(tensors.tensors(), layout=tensors.layout)
        except BusError as error:
            _log.warning("weights of policy %s were not published: %s", policy, error)
            raise
        finally:
            publisher.forget()
        return _progress(policy, update, publishing.published)

    def _started(self, policy: str) -> _Update:
        update = self._updates.get(policy)
        if update is None or not update.waits_for_finish:
            message = f"no update of policy {policy!r} was started: begin with that"
            raise Refused(bad_request("policy", message))
        return update

    async def _require_bearable(self, member: _Membership, n_bytes: int) -> None:
        most = sum(map(bytes_in, member.forms)) + ALIGN_BYTES * len(member.forms)
        if n_bytes > most:
            why = f"a bucket of {n_bytes} bytes, the fleet's whole model has {most}"
            await member.group.end(why)
            raise Refused(bad_request("shapes", f"group {member.group.name!r} is over: {why}"))

    def _turn(self, policy: str) -> asyncio.Lock:
        return self._turns.setdefault(policy, asyncio.Lock())

    def _member(self, name: str) -> _Membership:
        member = self._joined.get(name)
        if member is None:
            there = f"there are {', '.join(self._joined)}" if self._joined else "there is none"
            message = f"no group {name[:128]!r} is joined here; {there}"
            raise Refused(bad_request("group_name", message))
        return member

    def _on_over(self, name: str, why: str) -> None:
        """A group is over: what came over it is of no use."""
        for policy, update in self._updates.items():
            if name in update.groups:
                update.problem = f"group {name!r} was over when {update.tensors.sentence} ({why})"
                update.tensors.forget()
                _log.warning("an update of policy %s is lost: %s", policy, update.problem)


@asynccontextmanager
async def _its_turn(
    lock: asyncio.Lock, group: JoinedGroup, if_cancelled: str
) -> AsyncGenerator[None]:
    """One bucket after another, in the order in which rank 0 sends them.

    Who is cancelled while it waits ends the group, with this reason: rank 0 sends the bucket all
    the same, so the next one would take its bytes, or the version would lack them.
    """
    try:
        await lock.acquire()
    except asyncio.CancelledError:
        await group.end(if_cancelled)
        raise
    try:
        yield
    finally:
        lock.release()


def _progress(policy: str, update: _Update, published: Published | None = None) -> Progress:
    tensors = update.tensors
    return Progress(policy, tensors.sentence, tensors.n_in, tensors.n_all, published)
