"""Enrolment: who holds an invitation has a key of theirs put on the allow-list.

A newcomer's connection is the router's as any other, but no entry of it reaches the core: what it
asks is answered here, by the file of the allow-list. Spec: docs/protocol.md, "Security", 15.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rolloutbus.bus.security.invites import KeyList, enrolled, without_old
from rolloutbus.bus.security.key_files import edit_key_list
from rolloutbus.bus.security.principals import Principal
from rolloutbus.bus.wire.codec import pack, unpack_as
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import Refused, RemoteProtocolError, SettingsError
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.membership import Enrol, Enrolled

TELL_AGAIN_S = 10.0
MAX_TOLD = 1000
"""Refusals that are remembered for it."""


class Enrolment:
    """Answers newcomers."""

    def __init__(
        self,
        allow_list: Path,
        on_changed: Callable[[], None],
        tell: Callable[[str], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        """Let newcomers into an allow-list.

        Args:
            allow_list: its file.
            on_changed: called when the file has been changed.
            tell: hears a sentence of each attempt, for the operator.
            now: seconds since 1970: invitations expire by the clock on the wall.
        """
        self._allow_list = allow_list
        self._on_changed = on_changed
        self._tell = tell
        self._now = now
        self._tell_again_at: dict[str, float] = {}
        """Refusal -> when its operator is told of it again."""

    def answer(self, newcomer: Principal, entries: Sequence[Entry], host: str) -> list[Entry]:
        """The answers to what a newcomer says: to one `enrol` at a time, since each reads a file.

        Args:
            newcomer: holder of an invitation; `.key` is the invitation's.
            entries: what they say.
            host: address that they come from, for the log.
        """
        why = "one thing at a time: wait for its answer"
        others = [_refusal(each, Problem("busy", why, "not_started")) for each in entries[1:]]
        return [*(self._answered(newcomer, each, host) for each in entries[:1]), *others]

    def _answered(self, newcomer: Principal, entry: Entry, host: str) -> Entry:
        who = f"invitation of {newcomer.name!r}, used from {host or 'this host'}"
        if entry.kind != "enrol":
            why = "who holds an invitation may only enrol"
            return _refusal(entry, Problem("forbidden", why, "not_started"))
        try:
            admitted = self._enrol(newcomer.key, unpack_as(Enrol, entry).key)
        except RemoteProtocolError as error:
            return _refusal(entry, Problem("bad_request", str(error), "not_started"))
        except Refused as refused:
            self._tell_of_refusal(f"{who}: refused: {refused}")
            return _refusal(entry, refused.problem)
        except BlockingIOError:
            why = "another process edits the allow-list; try again"
            return _refusal(entry, Problem("busy", why, "not_started"))
        except SettingsError as error:
            self._tell_of_refusal(f"{who}: {error}")
            why = "the router cannot write its allow-list; its log says why"
            return _refusal(entry, Problem("enrolment_failed", why, "not_started"))
        self._tell(f"{who}: the {admitted.role}'s key {admitted.key} is let in")
        return Entry("enrolled", entry.rid, body=pack(Enrolled(admitted.name, admitted.role)))

    def _tell_of_refusal(self, sentence: str) -> None:
        """The same one not more often than every TELL_AGAIN_S: tries cost a newcomer nothing."""
        now_s = self._now()
        if now_s >= self._tell_again_at.get(sentence, 0.0):
            if len(self._tell_again_at) >= MAX_TOLD:
                self._tell_again_at.clear()
            self._tell_again_at[sentence] = now_s + TELL_AGAIN_S
            self._tell(sentence)

    def _enrol(self, invite_key: str, key: str) -> Principal:
        now_s = self._now()

        def edit(listed: KeyList) -> KeyList:
            after = enrolled(listed, invite_key, key, now_s)
            return KeyList(after.principals, without_old(after.invites, now_s))

        # It blocks the router for some milliseconds, but for nobody who holds the file's lock.
        listed = edit_key_list(self._allow_list, edit, waits=False)
        self._on_changed()
        # A key that was let in before may have been revoked since.
        for each in listed.principals:
            if each.key == key:
                return each
        raise Refused(Problem("forbidden", "this key was revoked", "not_started"))


def _refusal(entry: Entry, problem: Problem) -> Entry:
    return Entry("refused", entry.rid, body=pack(problem))
