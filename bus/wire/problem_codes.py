"""The closed list of codes that a `Problem` may have: what each means, and what to do about it.

The table in docs/protocol.md and the page docs/reference/errors.md are made from it.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from rolloutbus.bus.wire.messages.endings import Outcome


class Code(NamedTuple):
    """One code."""

    endings: tuple[Literal["refused", "failed", "expired"], ...]
    """Which endings have it."""
    outcomes: tuple[Outcome, ...]
    meaning: str
    advice: str
    """What the caller does now: one or two sentences."""


CODES: Mapping[str, Code] = {
    "bad_request": Code(
        ("refused", "failed"),
        ("not_started", "failed"),
        "a value breaks a limit, or a tensor cannot be weights; `field` names it",
        "Change the value that `.field` names; the message says what is allowed.",
    ),
    "unknown_message": Code(
        ("refused",),
        ("not_started",),
        "the receiver does not know this kind",
        "Give client, router and workers the same version of rolloutbus.",
    ),
    "forbidden": Code(
        ("refused", "failed"),
        ("not_started",),
        "the role of this key does not allow it",
        "Use a key with the role that the message names, or allow yours again with that role: "
        "`rolloutbus keys allow`.",
    ),
    "unknown_worker": Code(
        ("refused",),
        ("not_started",),
        "nobody of that name is live; of a `generate`: nor expected to be",
        "Look at the names in `rolloutbus status`, or leave `worker=` out.",
    ),
    "unknown_policy": Code(
        ("refused",),
        ("not_started",),
        "no worker of that policy is here or expected, and none came within 10 s; the message "
        "names the policies that there are",
        "Correct `policy=`, or start a worker of it: `rolloutbus worker --policy NAME`.",
    ),
    "unknown_request": Code(
        ("refused",),
        ("not_started",),
        "no detached request of that name is held",
        "Ask `client.reattach()` which are held. One that nobody asked for is dropped after a "
        "while: generate it again.",
    ),
    "invite_malformed": Code(
        ("refused",),
        ("not_started",),
        "what `keys join` was given is no token, or not the whole of one",
        "Copy the whole line that `rolloutbus keys invite` has printed.",
    ),
    "invite_expired": Code(
        ("refused",),
        ("not_started",),
        "the invitation was good until a time that has passed",
        "Make another one: `rolloutbus keys invite`, with more `--minutes` if need be.",
    ),
    "invite_used": Code(
        ("refused",),
        ("not_started",),
        "another key was let in by this invitation; the message names it",
        "If that key is none of yours, revoke it: `rolloutbus keys revoke KEY`. Then make another "
        "invitation.",
    ),
    "invite_unknown": Code(
        ("refused",),
        ("not_started",),
        "the router knows no such invitation: it was withdrawn, or is of another fleet",
        "Make another one on the router's host: `rolloutbus keys invite`.",
    ),
    "enrolment_failed": Code(
        ("refused",),
        ("not_started",),
        "the router cannot write its allow-list",
        "The router's log says why. Let it write the directory of its allow-list, and join again.",
    ),
    "unknown_session": Code(
        ("refused",),
        ("not_started",),
        "no such session",
        "Open the session again; your client has its tokens, so nothing is lost.",
    ),
    "session_taken": Code(
        ("refused",),
        ("not_started",),
        "another client has opened it",
        "Give each session a name of its own, or close it at the other client.",
    ),
    "duplicate_rid": Code(
        ("refused",),
        ("not_started",),
        "another client uses this rid",
        "Leave `rid=` out, so that a fresh one is made, or give clients different names.",
    ),
    "busy": Code(
        ("refused", "failed"),
        ("not_started",),
        "the queue is full, or too long for the deadline, or all places of sessions are taken, or "
        "the bytes asked for have not arrived yet; see `retry_after_ms`",
        "Ask again after `.retry_after_ms`. If it goes on, ask for less at once, give a longer "
        "deadline, or start more workers.",
    ),
    "not_ready": Code(
        ("refused",),
        ("not_started",),
        "the worker is starting, paused, asleep or draining, or its weights do not satisfy the "
        "rule now; or no worker is live",
        "Look at `rolloutbus status`, which says why each worker gets no work; then resume, wake "
        "up, or wait. Clients send such a `generate` again by themselves.",
    ),
    "stale_version": Code(
        ("refused", "failed"),
        ("not_started",),
        "an update names a version below the one that is committed or active: numbers only grow",
        "Publish again: the store gives the next number. `publisher.restore` brings older content "
        "back as a new version.",
    ),
    "version_unavailable": Code(
        ("refused", "failed"),
        ("not_started",),
        "who answers does not have the version: for a router, no worker had it before the "
        "deadline, or none can any more; the same of a store, or of a worker that passes weights "
        "on",
        "Ask with a rule that can still come true, such as `min:V` or `latest`, or give a longer "
        "deadline; `rolloutbus status` shows the versions.",
    ),
    "no_store": Code(
        ("refused", "failed"),
        ("not_started",),
        "there is no weight store, or it does not answer",
        "Start the fleet with its store (`up` does), or start `rolloutbus store`.",
    ),
    "update_in_progress": Code(
        ("refused",),
        ("not_started",),
        "another update of this policy runs",
        "Wait for it: `rolloutbus status` shows how far it is. Publish from one process only.",
    ),
    "store_full": Code(
        ("refused",),
        ("not_started",),
        "no room for another version, or to write down what becomes of one",
        "Give the store's host more shared memory or disk; the message says which is full.",
    ),
    "no_delta": Code(
        ("failed",),
        ("not_started",),
        "the versions have different tensors, or a delta would be no smaller than the version",
        "Nothing: the worker takes the whole version instead.",
    ),
    "deadline": Code(
        ("expired",),
        ("not_started", "unknown"),
        "the deadline passed",
        "Give a longer `deadline_s`, or ask for fewer tokens; `rolloutbus top` shows how long the "
        "queue is.",
    ),
    "unsupported": Code(
        ("failed",),
        ("not_started",),
        "the worker's engine cannot do this, or its operator does not let it; `field` names what",
        "The message says which option or engine has it; `rolloutbus doctor` lists what yours can "
        "do.",
    ),
    "result_too_large": Code(
        ("failed",),
        ("failed",),
        "the result does not fit into one body: ask for less at once",
        "Ask for fewer samples, texts or tensors in one call.",
    ),
    "digest_mismatch": Code(
        ("failed",),
        ("failed",),
        "bytes are not those that were sealed",
        "Publish again. If it comes back, look at memory and network of the host that the message "
        "names.",
    ),
    "update_failed": Code(
        ("failed",),
        ("failed",),
        "too few workers prepared the version; the old one stays",
        "Read why each worker failed: the message says it. Then publish again, or ask for less "
        "with `require=`.",
    ),
    "update_unknown": Code(
        ("failed",),
        ("unknown",),
        "the store was asked to record the commit and has not said whether it did",
        "Ask `publisher.outcome(version)` before you publish again.",
    ),
    "engine_failed": Code(
        ("failed",),
        ("failed",),
        "the engine reported an error",
        "Read the message, and the worker's log (`up --keep-logs`).",
    ),
    "engine_died": Code(
        ("failed",),
        ("unknown", "failed"),
        "the worker's engine died before the command ended; outcome `failed`: whatever it had done "
        "is gone with that engine, `unknown`: some of it may have stayed, in files or as the "
        "fleet's intent",
        "Send it again when `rolloutbus status` shows the worker ready: it starts a new engine by "
        "itself. If `.outcome` is `unknown`, look first at what is there. Why the engine died "
        "stands in the message and in the worker's log.",
    ),
    "broken_weights": Code(
        ("failed",),
        ("failed",),
        "the active weights overflow: the logits are no numbers; field `lora`: perhaps the "
        "adapter's do",
        "Publish sound weights, or `publisher.restore` the last good version.",
    ),
    "out_of_memory": Code(
        ("failed",),
        ("failed",),
        "the engine has no room for this request, not even alone",
        "Ask for fewer tokens, or give the engine more KV cache: see the page on sizing.",
    ),
    "engine_crashed": Code(
        ("failed",),
        ("failed",),
        "the engine's process died under this request too often",
        "Read the end of the worker's log. The request itself may be sound: try it again when the "
        "fleet is well.",
    ),
    "poison": Code(
        ("failed",),
        ("failed",),
        "the engine's process died each time this request ran, at last alone",
        "Do not send it again. `rolloutbus inspect` prints its dead letter, which is a bug report "
        "for the engine.",
    ),
    "worker_lost": Code(
        ("failed",),
        ("unknown",),
        "the worker went away and the caller asked not to go on",
        "Leave `on_loss` at its default, and requests go on elsewhere; or take `.partial` and ask "
        "again.",
    ),
    "internal": Code(
        ("failed",),
        ("unknown", "failed"),
        "a fault of the bus itself",
        "Report it, with the logs and, if you have one, the journal of the router.",
    ),
}
"""Code -> what it is; of problems that cross the wire."""

LOCAL_CODES: Mapping[str, str] = {
    "cancelled": "You, or a trainer with `abort_policy`, aborted the request; `.partial` of "
    "`RolloutCancelled` has what was sampled.",
    "unknown_model": "The gateway's callers named a model that the fleet does not serve: "
    "`GET /v1/models` lists those that it does.",
}
"""Code -> what to do; of problems that a client or a gateway makes itself, so they never cross."""
