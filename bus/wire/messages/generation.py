"""Messages of generation: arrays, requests, sessions, repairs, and the columns of streams.

Spec: docs/protocol.md, "Arrays", "Generation", "Sessions", "Streams".
"""

import functools
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from rolloutbus.bus.wire.limits import (
    MAX_ARRAYS,
    MAX_ITEMS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS_OF,
    MAX_MEDIA,
    MAX_PARAM_ITEMS,
    MAX_PARAMS,
    MAX_PROCESSORS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    AttemptId,
    AttemptIds,
    Column,
    HeaderText,
    Natural,
    Naturals,
    Piece,
    Rid,
    Rids,
    Shape,
    Short,
    Text,
    VersionRuns,
)
from rolloutbus.bus.wire.near_names import nearest

DEFAULT_LEASE_S = 60.0
DEFAULT_GRACE_S = 30.0


class OpenSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Give a session a place at a worker, or renew it."""

    session: HeaderText
    policy: HeaderText = "default"
    lease_s: float = DEFAULT_LEASE_S
    """The place is kept this long without a request of the session under way."""
    grace_s: float = DEFAULT_GRACE_S
    """After a request of the session, its next one goes first for this long."""
    worker: HeaderText = ""
    """Where it had its place, as far as its client knows; of a new one, whose cache to share."""


class OpenedSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `open_session`."""

    worker: Short


class CloseSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Give a session's place up."""

    session: HeaderText


class SessionMoved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Router to the session's client: its place is at another worker, without its prefix."""

    session: Short
    from_worker: Short = msgspec.field(name="from")
    to_worker: Short = msgspec.field(name="to")
    reason: Short
    """`lost`, `version`, `full`, `isolating`, or the state of the worker that it left."""


ArrayDtype = Literal["int32", "int64", "float32", "float16", "bfloat16", "uint8"]


class Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Elements of one type; `bus.wire.arrays` makes and reads them."""

    dtype: ArrayDtype
    shape: Shape
    data: Piece
    """Little endian, row-major."""


Arrays = Annotated[dict[Short, Array], msgspec.Meta(max_length=MAX_ARRAYS)]
"""Arrays of one result by name; see "Arrays"."""


FinishReason = Literal["stop", "length", "abort"]
DetachedState = Literal["waiting", "running", "ended"]
GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
MediaKind = Literal["image", "video", "audio"]
HiddenStates = Literal["", "last", "full"]

StopTexts = Annotated[
    list[Annotated[str, msgspec.Meta(max_length=MAX_STOP_CHARS)]],
    msgspec.Meta(max_length=MAX_STOPS),
]
Numbers = Annotated[list[int | float], msgspec.Meta(max_length=MAX_PARAM_ITEMS)]
Params = Annotated[dict[Short, bool | int | float | Numbers], msgspec.Meta(max_length=MAX_PARAMS)]


_GRAMMAR = "say it in grammar=Grammar({name!r}, text), a parameter of the call"
_TEXT = "results are token ids; a TextClient makes text of them"
SAID_ELSEWHERE: Mapping[str, str] = {
    "n": "for n samples of each prompt call generate_batch(prompts, sampling, n=...)",
    "stream": "call the method `stream` for tokens as they come",
    "logprobs": "the logprobs of sampled tokens always come; ask for others with want=Want(...)",
    "custom_params": "give processors=[Processor(name, params)], a parameter of the call",
    "skip_special_tokens": _TEXT,
    "spaces_between_special_tokens": _TEXT,
    "no_stop_trim": "results keep the stop token and the stop text",
    "stream_interval": "streams come with every engine step",
    **{name: _GRAMMAR.format(name=name) for name in get_args(GrammarKind)},
}
"""Sampling parameters of other libraries that are no field of `SamplingParams` -> what to do."""


class _Told(msgspec.StructMeta):
    """Metaclass of structs that callers make: refuses unknown fields and choices with a hint."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, N805 - of a class
        for name in kwargs:
            if name not in cls.__struct_fields__:
                if cls is SamplingParams and name in SAID_ELSEWHERE:
                    raise TypeError(f"SamplingParams has no field {name!r}: {SAID_ELSEWHERE[name]}")
                meant = nearest(name, cls.__struct_fields__)
                fields = ", ".join(cls.__struct_fields__)
                hint = f"did you mean {meant}=?" if meant else f"there are {fields}"
                raise TypeError(f"{cls.__name__} has no field {name!r}; {hint}")
        made = super().__call__(*args, **kwargs)
        for name, choices in _choices_of(cls):
            value = getattr(made, name)
            if value not in choices:
                known = ", ".join(each or "''" for each in choices)
                raise ValueError(f"{cls.__name__}: {name} is {value!r}; it must be among {known}")
        return made


@functools.cache
def _choices_of(struct: type) -> list[tuple[str, tuple[str, ...]]]:
    """The fields that take one of few texts, and those texts."""
    fields = struct.__annotations__.items()
    return [(name, get_args(kind)) for name, kind in fields if get_origin(kind) is Literal]


class SamplingParams(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, metaclass=_Told
):
    """How tokens are drawn. Limits are checked by `bus.wire.validation`."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    sampling_seed: int | None = msgspec.field(name="seed", default=None)
    """Token i is drawn with a generator seeded by (this, i); None: the engine's own choice."""
    stop_token_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] = []
    """Besides the model's end-of-sequence ids; the stop token is part of the output."""
    ignore_eos: bool = False
    stop: StopTexts = []
    """Texts that end it when they appear in the output, which keeps them."""
    stop_regex: StopTexts = []
    logit_bias: Annotated[dict[int, float], msgspec.Meta(max_length=MAX_LOGIT_BIAS)] = {}
    """Token id -> what is added to its logit."""


class Want(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, metaclass=_Told
):
    """Results wanted besides tokens and logprobs; they come in `Generated.arrays`."""

    top_logprobs: int = 0
    """So many of the likeliest tokens in each place; 0 is off."""
    logprobs_of: Annotated[list[int], msgspec.Meta(max_length=MAX_LOGPROBS_OF)] = []
    """Token ids."""
    prompt_logprobs: bool = False
    """Of the prompt's tokens, and of the two above there too."""
    prompt_logprobs_start: int = 0
    """Index of the first prompt token wanted."""
    hidden_states: HiddenStates = ""
    routed_experts: bool = False
    """Which experts of a mixture each place went to."""
    sampling_mask: bool = False
    """The support that each token was sampled from."""
    cached_tokens: bool = False
    """How much of its input the engine found in its prefix cache."""


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True, metaclass=_Told):
    """A grammar that the output must match."""

    kind: GrammarKind
    text: Text
    """At most 64 KiB of UTF-8."""


class Processor(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, metaclass=_Told
):
    """Changes logits before sampling: a name that the engine's operator has registered."""

    name: Short
    params: Params = {}


class Media(msgspec.Struct, frozen=True, forbid_unknown_fields=True, metaclass=_Told):
    """Content that placeholder tokens in the prompt stand for."""

    kind: MediaKind
    data: Piece
    """A file's content, never a path or an address."""


NOTHING_MORE = Want()


class Prefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens already sampled by an earlier attempt: a resumed request goes on after them."""

    tokens: Column
    """int32 [k], little endian."""
    logprobs: Column
    """float32 [k]."""
    versions: VersionRuns
    behaviour_logprobs: Column = b""
    """float32 [k]; empty only if the request does not truncate."""


class Generate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sample one continuation of `prompt`. Ends with `Generated`."""

    prompt: Column
    """int32 [n_prompt_tokens], little endian, at least one token."""
    sampling: SamplingParams
    stream: bool = False
    """Publish every engine step; otherwise deltas come at a coarse interval."""
    prefix: Prefix | None = None
    lora: Short = ""
    """Adapter, `NAME` or `NAME@VERSION`; empty: none."""
    want: Want = NOTHING_MORE
    grammar: Grammar | None = None
    processors: Annotated[list[Processor], msgspec.Meta(max_length=MAX_PROCESSORS)] = []
    """Applied in this order."""
    media: Annotated[list[Media], msgspec.Meta(max_length=MAX_MEDIA)] = []
    """In the order of their placeholders in the prompt."""


class Generated(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of `finished` and `cancelled` for a `generate`: everything, prefix included."""

    tokens: Column
    """int32 [n]."""
    logprobs: Column
    """float32 [n]: log-softmax after temperature and penalties, before truncation."""
    versions: VersionRuns
    finish_reason: FinishReason
    digest: Natural
    """xxh3-64 of `tokens`."""
    n_prompt_tokens: Natural
    behaviour_logprobs: Column = b""
    """float32 [n], renormalised over the support sampled from; empty: nothing was truncated."""
    n_resumed: Natural = 0
    """Tokens that came with the prefix."""
    queue_ms: float = 0.0
    """From arrival at the worker to the first engine step."""
    run_ms: float = 0.0
    arrays: Arrays = {}
    """What `want` asked for; a row per token begins at token `n_resumed`."""
    lora: Short = ""
    """`NAME@VERSION` of the adapter that sampled all tokens, as the engine had it loaded; empty:
    no adapter."""


class Abort(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Stop exactly these requests of the sender (all of the sender's when `everything`)."""

    rids: Rids = msgspec.field(default_factory=list[str])
    everything: bool = False


class AbortPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stop the requests of all clients for this policy."""

    policy: HeaderText


class PolicyAborted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """To every client: somebody has asked for it, so abort what you have of this policy."""

    policy: HeaderText


class Aborted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many requests an `abort` found and stopped; each still gets its own ending."""

    n_aborted: Natural


class Repair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ask a worker for the part of a stream that was missed."""

    rid: Rid
    attempt: AttemptId
    start: int
    """Index of the first token wanted."""


class Repaired(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Tokens from `start` on, as far as the worker has sampled."""

    start: Natural
    tokens: Column
    logprobs: Column
    versions: VersionRuns
    behaviour_logprobs: Column = b""
    """float32 [k]; empty when nothing truncates."""


class ListDetached(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ask the router which detached requests of the sender's name it knows."""


class DetachedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request that goes on, or has ended, without the process that asked for it."""

    rid: Rid
    state: DetachedState
    group: HeaderText = ""
    """Of its placement: what its client called it by."""
    worker: Short = ""
    """Who runs it or keeps its ending; empty while it waits."""
    in_doubt: bool = False
    """It was lost, and the process that was told may be dead: it waits for that one to send it
    again, or to be taken for dead; then the router begins it again."""


class DetachedList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `list_detached`, in order of rids."""

    requests: Annotated[list[DetachedRequest], msgspec.Meta(max_length=MAX_ITEMS)]


class Attach(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Take a detached request up, under its own rid; ends with the ending of its `generate`."""


Finishes = Annotated[list[tuple[Natural, FinishReason]], msgspec.Meta(max_length=MAX_ITEMS)]
"""[(row, finish_reason)]."""


class Deltas(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One engine step for one subscriber topic, in columns; row i is one request.

    Also what an engine host reports to its actor after each step.
    """

    rids: Rids
    attempts: AttemptIds
    seqs: Naturals
    """Index of each row's first token in its request: contiguous, so a gap shows."""
    counts: Naturals
    """Tokens per row."""
    tokens: Column
    """int32 [sum(counts)]."""
    logprobs: Column
    """float32 [sum(counts)]."""
    versions: Naturals
    """Weight version per row: a row never mixes versions."""
    finishes: Finishes = msgspec.field(default_factory=list[tuple[int, FinishReason]])
    """(row, finish_reason) of rows that are complete."""
    behaviour_logprobs: Column = b""
    """float32 [sum(counts)]; empty: no row truncates. From an engine host NaN is what was not
    measured; it goes no further."""


class Idle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Open streams of a topic and how many tokens each has: a lost tail shows."""

    rids: Rids
    attempts: AttemptIds
    n_tokens: Naturals
