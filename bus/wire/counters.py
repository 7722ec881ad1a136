"""What actors count and measure, by name: a sentence for each, for people and for metrics.

A counter begins at 0 when its process starts. Spec: docs/protocol.md, "Counters".
"""

from collections.abc import Mapping

ROUTER_COUNTERS: Mapping[str, str] = {
    "adapters_brought": "Adapters that the router had workers load because the store keeps them.",
    "adapters_refused": "Adapters of the store that a worker could not load.",
    "adopted": "Requests that ran at workers already when this router started.",
    "bad_requests": "Requests refused because a value in their header is wrong.",
    "breaker_opened": "Times that a worker got no more requests because it failed too often.",
    "busy_refused": "Requests refused because the queue or the client's share of it was full.",
    "catch_ups": "Weight updates begun for single workers that were behind.",
    "dead_letters_dropped": "Requests that killed engines and could not be written down.",
    "detached_requeued": "Detached requests queued again after the loss of their worker.",
    "detached_uncollected": "Results of detached requests that were dropped before a client came.",
    "expired_leases": "Workers and stores whose lease ended because they were silent.",
    "fenced": "Executions that workers were told to drop because they are not theirs any more.",
    "forbidden": "Entries refused because the sender's key does not have the right.",
    "foreign_members": "Workers and stores turned away with weights of another fleet.",
    "intents_brought": "Pauses and resumes that the router brought to workers that missed them.",
    "isolated": "Requests that ran alone at a worker because they may have killed an engine.",
    "joins": "Workers and stores that joined.",
    "late_copies": "Copies of detached requests that came after their end.",
    "lost": "Executions that ended with the loss of their worker.",
    "malformed": "Messages dropped because they break the protocol.",
    "offenders_dismissed": "Connections ended for too many malformed messages.",
    "own_pauses": "Times that the router itself stood still, so that it judged no lease.",
    "places_moved": "Open sessions that got a place at another worker.",
    "policies_aborted": "Times that a trainer stopped the requests of all clients for a policy.",
    "poisoned": "Requests that are never sent again because they kill engines.",
    "prefix_affinity": "Requests that a cached beginning sent elsewhere than load alone would.",
    "prefix_gaps": "News about cached prefixes that a worker sent and that did not arrive.",
    "prefixes_not_kept": "Cached prefixes that the router had no room to note.",
    "rejected": "Messages that another router holds the fleet.",
    "resource_alarms": "Warnings that memory or file descriptors run out.",
    "resumed_waves": "Weight updates in waves that a router went on with after a restart.",
    "revoked": "Connections ended because the rights of their key changed.",
    "session_turns": "Requests of open sessions that went to their session's worker.",
    "sessions_closed": "Sessions that their client closed.",
    "sessions_expired": "Sessions whose lease ended.",
    "sessions_moved": "Times that requests of a session went to another worker than before.",
    "sessions_opened": "Sessions opened.",
    "sessions_refused": "Sessions refused.",
    "shunned": "Entries dropped because they came from a connection that was dismissed.",
    "silent_members": "Commands that a worker or store did not answer because it was lost.",
    "stale_heartbeats": "Heartbeats dropped because they are late or of an old lease.",
    "stale_hellos": "Hellos dropped because they are of an old lease.",
    "stale_prefixes": "News about cached prefixes dropped because they are of an old lease.",
    "strangers": "Entries dropped because their sender has not said hello.",
    "tap_dropped": "Messages that a recorder at the tap did not get.",
    "told_anew": "Weight updates told again because the store came back at another address.",
    "turned_away": "Connections cut off because file descriptors were scarce.",
    "undelivered": "Requests that could not be sent to their worker and were queued again.",
    "versions_given_back": "Versions reserved at the store and given back without a commit.",
}

WORKER_COUNTERS: Mapping[str, str] = {
    "cancelled_requests": "Requests that an abort, a pause or an update ended early.",
    "engine_exits": "Times that the engine process ended.",
    "expired_requests": "Requests whose deadline passed while they ran.",
    "failed_requests": "Requests that the engine failed.",
    "fenced": "Commands dropped because they are not of the present lease.",
    "finished_requests": "Requests that ended with a result.",
    "given_up": "Requests given up because the engine's process was stopped; they go on elsewhere.",
    "leases_lost": "Times that the worker's lease ended.",
    "links_lost": "Times that the connection to the router broke.",
    "malformed": "Entries dropped because they break the protocol.",
    "old_routers": "Messages ignored because a router sent them that was replaced.",
    "prompt_tokens": "Tokens of the prompts of requests that began.",
    "refused_requests": "Requests that the worker did not begin.",
    "repairs": "Parts of streams sent again to subscribers that missed them.",
    "requests": "Requests that began.",
    "resumed_requests": "Requests that began with tokens that an earlier attempt sampled.",
}

STORE_GAUGES: Mapping[str, str] = {
    "held_bytes": "Shared memory that the store holds for versions.",
    "held_versions": "Versions whose bytes the store holds or is being given.",
    "unwritten_versions": "Versions that the store could not write to its directory, since it last "
    "wrote one of their policy.",
}

WORKER_DURATIONS: Mapping[str, str] = {
    "first_token": "Time from the arrival of a request at the worker to its first token.",
    "next_token": "Time from one token of a request to its next one.",
    "update_stall": "Time for which a weight update stopped sampling.",
}
