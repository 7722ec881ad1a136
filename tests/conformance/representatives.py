"""One entry of each kind, every field of its body set to something telling.

`NAMES` maps the name of a vector to its entry: `<kind>` for all kinds with one body,
`finished.<command>` and `cancelled.<command>` for the two whose body depends on the command,
`finished.fleet` for a command that went to several members.
"""

import struct

import msgspec

from rolloutbus.bus.wire.durations import Durations
from rolloutbus.bus.wire.entry import NO_BODY, Entry, Placement
from rolloutbus.bus.wire.messages import control, endings, generation, host, membership, weights

RID = "trainer/7"
ATTEMPT = (3, 41)
BOOT = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
INSTANCE = "a0a1a2a3a4a5a6a7a8a9aaabacadaeaf"
EPOCH = f"{BOOT}.2"
VERSION = 2**40 + 5
"""Above 32 bits, so that a narrow integer shows."""
BULK = "tcp://127.0.0.1:7005"
STREAM = "tcp://127.0.0.1:7004"
POLICY = "default"

TOKENS = struct.pack("<3i", 1, 258, 32000)
LOGPROBS = struct.pack("<3f", -0.5, -1.25, -2.0)
BEHAVIOUR = struct.pack("<3f", -0.25, -1.0, -2.0)
MARKS = struct.pack("<2Q", 2**63 + 5, 258)
DURATIONS = Durations([0, 2, *[0] * 15, 1], 300.25)
RUNS = [(VERSION - 1, 2), (VERSION, 1)]

_encode = msgspec.msgpack.Encoder().encode

SAMPLING = generation.SamplingParams(
    max_new_tokens=64,
    min_new_tokens=2,
    temperature=0.75,
    top_p=0.5,
    top_k=40,
    min_p=0.125,
    repetition_penalty=1.5,
    frequency_penalty=0.25,
    presence_penalty=-0.25,
    sampling_seed=-(2**40),
    stop_token_ids=[2, 32000],
    ignore_eos=True,
    stop=["\n\n"],
    stop_regex=["[.!?]$"],
    logit_bias={2: -100.0, 32000: 1.5},
    no_stop_trim=True,
)
WANT = generation.Want(
    top_logprobs=5,
    logprobs_of=[1, 32000],
    prompt_logprobs=True,
    prompt_logprobs_start=1,
    hidden_states="last",
    routed_experts=True,
    sampling_mask=True,
    cached_tokens=True,
)
PROCESSOR = generation.Processor(
    "temperature_schedule", {"is_on": True, "n": 3, "final": 0.5, "ids": [1, 300, 2.5]}
)
SCORES = generation.Array("float32", (1, 3), LOGPROBS)
TENSORS = [
    weights.Tensor("lm_head.weight", "F32", (32000, 64), 0, 8192000, 2**64 - 1),
    weights.Tensor("norm.weight", "BF16", (64,), 8192000, 128, 1),
]
OFFER = weights.Offer(
    *("cuda_ipc", "GPU-4f", "host-1", "nccl"),
    [weights.Bucket(0, 4096, 2**64 - 1, b"\x01\x02")],
    BOOT,
)
MEMBER = membership.Member("w0", EPOCH, STREAM, "ready", VERSION, POLICY, ["GPU-4f"])
INTENT = membership.Intent((3, 8), INSTANCE, "in_place", {"w1": "", "w2": "drain"})
PROBLEM = endings.Problem(
    "bad_request", "top_p is 2; it must be at most 1", "not_started", "sampling.top_p", 250
)

_EVENTS: dict[str, msgspec.Struct] = {
    "hello": membership.Hello(
        role="worker",
        name="w0",
        boot=BOOT,
        epoch=EPOCH,
        router_epoch=3,
        protocol=(1, 3),
        worker=membership.WorkerFacts(
            *(POLICY, STREAM, 8, 4096, 32001, "transformers", ["generate", "pause"], [2], 4242),
            *("host-1", ["GPU-4f"], BULK, ["shm", "tcp"]),
        ),
        store=membership.StoreFacts(
            BULK, {POLICY: VERSION}, "host-1", has_files=True, tags={POLICY: [(VERSION, 300)]}
        ),
        router_instance=INSTANCE,
        intent=INTENT,
    ),
    "welcome": membership.Welcome(
        *(3, INSTANCE, 1, [MEMBER], BULK, 1500, "ipc:///run/bus/tap"),
        marks=True,
        fleet=INSTANCE,
    ),
    "members": membership.Members([MEMBER], BULK, marks=True, fleet=INSTANCE),
    "prefixes": membership.Prefixes(7, MARKS, struct.pack("<Q", 2**64 - 2)),
    "dismissed": membership.Dismissed("unknown-peer", "say hello again"),
    "beat": membership.Heartbeat(
        seq=900,
        version=VERSION,
        state="paused",
        steps=12345,
        free=6,
        running=[(RID, ATTEMPT, "trainer")],
        outbox=[("trainer/6", (3, 40), "trainer")],
        n_tokens=70000,
        stalled_ms=12.5,
        detached=[(RID, "prompt-9")],
        over=["trainer/5"],
        suspects=[(RID, 2, 1)],
        intent=(3, 8),
        follows=899,
        acked=[("trainer/4", (3, 38))],
        n_outbox=1,
        backlog=[("trainer", 300, 30 << 20)],
        counters={"repairs": 3},
        durations={"first_token": DURATIONS},
        gauges={"held_bytes": 8192128.0},
        keys=INSTANCE,
    ),
    "client_beat": membership.ClientHeartbeat(900),
    "lease": membership.Lease(3, INSTANCE, 900, is_behind=True),
    "goodbye": membership.Goodbye("engine_crashed"),
    "rejected": membership.Rejected(3, INSTANCE),
    "intent": INTENT,
    "allow_list": membership.HandedKeys(
        INSTANCE, [membership.AllowedKey("ab" * 32, "w", "worker", ["w-*"], ["s"], (-1, 2))]
    ),
    "enrol": membership.Enrol("ab" * 32),
    "enrolled": membership.Enrolled("host-b", "worker"),
    "queued": endings.Queued([RID]),
    "accepted": endings.Accepted([(RID, ATTEMPT)]),
    "ack": endings.Ack([(RID, ATTEMPT)], [RID]),
    "lost": endings.Lost([(RID, ATTEMPT)], "w0", "lease_expired"),
    "fenced": endings.Fenced([(RID, ATTEMPT)], "superseded"),
    "update_progress": weights.UpdateProgress(VERSION, "committing", 4, 3, 1, "update-1"),
    "policy_aborted": generation.PolicyAborted(POLICY),
    "session_moved": generation.SessionMoved("conv-1", "w0", "w1", "lost"),
    "deltas": generation.Deltas(
        rids=[RID, "trainer/8"],
        attempts=[ATTEMPT, (3, 42)],
        seqs=[7, 0],
        counts=[2, 1],
        tokens=TOKENS,
        logprobs=LOGPROBS,
        versions=[VERSION - 1, VERSION],
        finishes=[(1, "length")],
        behaviour_logprobs=BEHAVIOUR,
    ),
    "idle": generation.Idle([RID], [ATTEMPT], [9]),
    "pull_manifest": weights.PullManifest(POLICY, VERSION),
    "manifest": weights.Manifest(
        *(POLICY, VERSION, "host-1", "rb-5f", 8192128, TENSORS, [OFFER]), allow_zeros=True
    ),
    "pull_delta": weights.PullDelta(POLICY, VERSION, VERSION - 1),
    "delta": weights.WeightDelta(
        POLICY, VERSION, VERSION - 1, 4104, [weights.DeltaPart(1, "sparse", 0, 4104)]
    ),
    "pull_chunk": weights.PullChunk(POLICY, VERSION, 4096, 8, VERSION - 1),
    "chunk": weights.Chunk(4096, bytes(range(8))),
    "push_chunk": weights.PushChunk(POLICY, VERSION, 4096, bytes(range(8))),
    "engine_starting": host.EngineStarting("loading weights"),
    "engine_ready": host.EngineReady(
        *("transformers", 32001, 4096, 8, [2], ["generate", "pause"]),
        *("host-1", ["GPU-4f"], BULK, ["shm", "tcp"]),
        *(["lora", "stop"], {"tp": 2}, {"sglang": "0.5.17"}, {"judge": VERSION}),
        {"seed": "sglang 9.9.9 cannot carry it: there is no sampling_seed"},
    ),
    "extras": host.Extras(RID, ATTEMPT, {"top_logprobs": SCORES}, "judge@7"),
    "engine_failed": host.EngineFailure("the model's folder has no config.json"),
    "engine_beat": host.EngineHeartbeat(12345, 2, 3, 640, VERSION, torn=True, n_held=1),
}

_COMMANDS: dict[str, msgspec.Struct] = {
    "generate": generation.Generate(
        TOKENS,
        SAMPLING,
        stream=True,
        prefix=generation.Prefix(TOKENS, LOGPROBS, RUNS, BEHAVIOUR),
        lora="judge@7",
        want=WANT,
        grammar=generation.Grammar("regex", "[a-z]+"),
        processors=[PROCESSOR],
        media=[generation.Media("image", b"\x89PNG")],
    ),
    "abort": generation.Abort(["trainer/5", "trainer/6"], everything=True),
    "abort_policy": generation.AbortPolicy(POLICY),
    "repair": generation.Repair("trainer/6", (3, 40), 5),
    "list_detached": generation.ListDetached(),
    "attach": generation.Attach(),
    "pause": control.Pause("retract"),
    "resume": control.Resume(),
    "sleep": control.Sleep(["weights", "kv_cache"]),
    "wake_up": control.WakeUp(["weights"]),
    "flush_cache": control.FlushCache(["host", "storage"]),
    "server_info": control.ServerInfo(),
    "shutdown": control.Shutdown(drain=False, comes_back=True),
    "score": control.Score(TOKENS, [TOKENS, b""], [1, 258], apply_softmax=False, item_first=True),
    "embed": control.Embed([TOKENS], 256),
    "rerank": control.Rerank([("why?", "because")]),
    "load_lora": control.LoadLora("judge", VERSION, "adapters/judge", BULK),
    "unload_lora": control.UnloadLora("judge"),
    "save_weights": control.SaveWeights("results", "step-100", "sharded"),
    "start_profile": control.StartProfile(5, ["CPU"], with_stack=True, record_shapes=True),
    "stop_profile": control.StopProfile(),
    "get_load": control.GetLoad(),
    "open_session": generation.OpenSession("conv-1", POLICY, 90.5, 20.25, "w0"),
    "close_session": generation.CloseSession("conv-1"),
    "status": control.Status(),
    "reserve_version": weights.ReserveVersion(POLICY, TENSORS, VERSION, above=4),
    "verify_tensors": weights.VerifyTensors(POLICY, VERSION, [1, 0], [2**64 - 1, 1]),
    "seal_version": weights.SealVersion(POLICY, VERSION, [2**64 - 1, 1], [OFFER], allow_zeros=True),
    "restore_version": weights.RestoreVersion(POLICY, VERSION - 1, above=4),
    "settle_version": weights.SettleVersion(POLICY, VERSION),
    "publish_version": weights.PublishVersion(
        *(POLICY, VERSION, "retract", "at-least:3", "collective", "overwrite", 2, [OFFER], 300)
    ),
    "prepare_update": weights.PrepareUpdate(
        *(POLICY, VERSION, BULK, "collective", [STREAM], "overwrite", 2, 5)
    ),
    "commit_update": weights.CommitUpdate(POLICY, VERSION, "finish_old"),
    "abort_update": weights.AbortUpdate(POLICY, VERSION),
    "record_commit": weights.RecordCommit(POLICY, VERSION, tag=300),
    "check_weights": weights.CheckWeights(["lm_head.weight"]),
    "get_weights": weights.GetWeights("lm_head.weight", 4096, 8),
    "list_weights": weights.ListWeights(),
}

_ROUTES = {
    "repair": "worker:w0",
    **dict.fromkeys(
        ("pause", "resume", "sleep", "wake_up", "flush_cache", "server_info", "shutdown"), "fleet"
    ),
    **dict.fromkeys(
        (
            "reserve_version",
            "verify_tensors",
            "seal_version",
            "restore_version",
            "settle_version",
        ),
        "store",
    ),
    "record_commit": "store",
    "check_weights": "fleet",
    **dict.fromkeys(("get_weights", "list_weights"), "worker:w0"),
    **dict.fromkeys(("load_lora", "unload_lora", "start_profile", "stop_profile"), "fleet"),
    **dict.fromkeys(("score", "embed", "rerank", "save_weights", "get_load"), "worker:w0"),
}
"""Where a client sends each command; empty for the others: the router answers or places it."""

_GENERATED = generation.Generated(
    tokens=TOKENS,
    logprobs=LOGPROBS,
    versions=RUNS,
    finish_reason="length",
    digest=2**64 - 1,
    n_prompt_tokens=3,
    behaviour_logprobs=BEHAVIOUR,
    n_resumed=2,
    queue_ms=1.5,
    run_ms=250.25,
    arrays={"hidden_states": generation.Array("bfloat16", (1, 2), b"\x80\x3f\x00\x40")},
    lora="judge@7",
)
_MEMORY = control.Memory({"kv_cache": 2**33, "weights": 2**31}, ["kv_cache", "weights"])
_DONE = endings.Done("nothing was running")
_FLEET_OUTCOME = control.FleetOutcome(
    [
        control.WorkerOutcome("w0", "finished", msgspec.Raw(_encode(_DONE))),
        control.WorkerOutcome("w1", "failed", msgspec.Raw(_encode(PROBLEM))),
    ],
    ["w2"],
)
_FLEET_STATUS = control.FleetStatus(
    router_epoch=3,
    instance=INSTANCE,
    recovering=False,
    workers=[
        control.WorkerStatus(
            *("w0", EPOCH, "ready", POLICY, VERSION, "transformers"),
            *(8, 2, 640, 120, 12.5, 4242, "late", 96, {"behind": "Its weights are old."}),
            *(12345, 6, 1, {"repairs": 3}, {"first_token": DURATIONS}),
        )
    ],
    committed={POLICY: VERSION},
    n_queued=4,
    n_running=2,
    n_clients=1,
    counters={"fenced": 1, "lost": 0},
    sessions={"w0": 3},
    troubled={"w2": "engine_failed: the engine host was ended by SIGABRT"},
    updates=[weights.UpdateStatus(POLICY, VERSION, "committing", 1500, 4, 3, 1, is_catch_up=True)],
    fleet=INSTANCE,
    pause="in_place",
    paused={"w1": "", "w2": "drain"},
    absent={"w2": "it was lost (expired)"},
    store=control.StoreStatus("store", 120, {"held_bytes": 8192128.0}, {"fenced": 0}),
    tags={POLICY: 300},
    standby="ready",
)

_RESULTS: dict[str, msgspec.Struct] = {
    **dict.fromkeys(("pause", "resume", "shutdown", "start_profile", "close_session"), _DONE),
    **dict.fromkeys(
        ("verify_tensors", "seal_version", "abort_update", "record_commit", "push_chunk"), _DONE
    ),
    "generate": _GENERATED,
    "abort": generation.Aborted(2),
    "abort_policy": generation.Aborted(2),
    "repair": generation.Repaired(5, TOKENS, LOGPROBS, RUNS, BEHAVIOUR),
    "list_detached": generation.DetachedList(
        [generation.DetachedRequest(RID, "running", "prompt-9", "w0", in_doubt=True)]
    ),
    "attach": _GENERATED,
    "sleep": _MEMORY,
    "wake_up": _MEMORY,
    "flush_cache": control.Flushed(640),
    "server_info": control.ServerFacts(
        *("transformers", VERSION, "ready", 12345, 2, 1, 640, 32001, 4096, 8),
        *({"tp": 2}, {"torch": "2.9.1"}, ["seed"], {"judge": VERSION}, ["kv_cache"]),
        clock_ms=1_764_000_000_000,
    ),
    "score": control.Scored(SCORES, 9),
    "embed": control.Embedded(SCORES, 9),
    "rerank": control.Reranked(generation.Array("float32", (3,), LOGPROBS)),
    "load_lora": control.Adapters({"judge": VERSION}),
    "unload_lora": control.Adapters({"judge": VERSION}),
    "save_weights": control.Saved("/results/step-100", ["model.safetensors"], 8192128),
    "stop_profile": control.Profiled(["profile-1/trace.json.gz"]),
    "get_load": control.Load({"num_running_reqs": 2.0, "token_usage": 0.25}),
    "status": _FLEET_STATUS,
    "open_session": generation.OpenedSession("w0"),
    "reserve_version": weights.Reserved(VERSION, "host-1", "rb-5f", 8192128),
    "restore_version": weights.VersionRestored(VERSION),
    "settle_version": weights.Settled(is_committed=True),
    "publish_version": weights.VersionPublished(
        VERSION,
        [
            weights.WorkerUpdate(
                "w0",
                is_active=True,
                stall_ms=8.5,
                problem="late",
                transport="tcp",
                moved_bytes=8192128,
                why="another host",
            )
        ],
    ),
    "prepare_update": weights.Prepared(VERSION, 8192128, "tcp", 15.5, 8192128, "another host"),
    "check_weights": weights.CheckedWeights(
        VERSION, [weights.TensorCheck("lm_head.weight", 2**64 - 1, 3, is_zero=True)]
    ),
    "get_weights": weights.GotWeights(VERSION, "BF16", (2, 4), 4096, bytes(range(8))),
    "list_weights": weights.ListedWeights([weights.TensorForm("lm_head.weight", "BF16", (2, 4))]),
    "commit_update": weights.Committed(VERSION, 8.5, 2, 1),
    "fleet": _FLEET_OUTCOME,
}


def _entry(kind: str, body: msgspec.Struct | None, **header: object) -> Entry:
    raw = NO_BODY if body is None else msgspec.Raw(_encode(body))
    return msgspec.structs.replace(Entry(kind, body=raw), **header)


def _command(kind: str, body: msgspec.Struct) -> Entry:
    place = None
    if kind == "generate":
        place = Placement(
            POLICY, "max-staleness:2", "", "prompt-9", 67, -5, resend=True, worker="w1"
        )
        place = msgspec.structs.replace(place, crashes=2, outlives_client=True, marks=MARKS)
    return _entry(kind, body, rid=RID, route=_ROUTES.get(kind, ""), deadline_ms=30000, place=place)


def _ending(kind: str, body: msgspec.Struct | None) -> Entry:
    """As a worker sends it: the route names the client."""
    return _entry(kind, body, rid=RID, attempt=ATTEMPT, epoch=EPOCH, route="trainer")


NAMES: dict[str, Entry] = {
    **{kind: _entry(kind, body, epoch=EPOCH, route="w0") for kind, body in _EVENTS.items()},
    **{kind: _command(kind, body) for kind, body in _COMMANDS.items()},
    **{kind: _ending(kind, PROBLEM) for kind in ("failed", "expired", "refused")},
    **{f"finished.{command}": _ending("finished", body) for command, body in _RESULTS.items()},
    "cancelled.generate": _ending("cancelled", _GENERATED),
    "cancelled.empty": _ending("cancelled", None),
}
