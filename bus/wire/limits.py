"""The limit of every field on the wire, as types that the decoder checks before it allocates.

A length is checked when its prefix is read, so that a claim of four billion items costs nothing.
Spec: docs/protocol.md, "Limits".
"""

from typing import Annotated

from msgspec import Meta

MAX_SHORT_CHARS = 64
"""Names, states, codes, boots, epochs: whatever is compared or looked up."""
MAX_HEADER_CHARS = 256
"""Texts in an entry's header, before a closer look can refuse them by name; endpoints."""
MAX_RID_CHARS = 188
"""A client's rid (123), an `@` and the name of a member (64)."""
MAX_SENTENCE_CHARS = 4096
"""What is written for people."""
MAX_TENSOR_NAME_BYTES = 512
MAX_FIELD_CHARS = MAX_TENSOR_NAME_BYTES + 64
"""A dotted field; tensors are named in it."""

MAX_BATCH_ENTRIES = 128
MAX_ITEMS = 100_000
"""Rows of a list that serves a whole loop turn; what a client may have open at once."""
MAX_MEMBERS = 10_000
MAX_POLICIES = 10_000
MAX_PRINCIPALS = 50_000
"""Keys of an allow-list."""
MAX_PATTERNS = 64
"""Names of actors, and of sessions, that one key may take."""
MAX_PRIORITY = 100
"""Priorities lie in [-100, 100]."""
MAX_TAGS = 16
"""Labels of versions of one policy that are remembered, the latest ones."""
MAX_SLOTS = 1_000_000
"""Requests that one engine runs side by side."""
MAX_KINDS = 256
"""Capabilities, counters, memory tags: as many as there can be names in the code."""
MAX_EOS_TOKENS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_STOPS = 32
"""Stop strings, and stop patterns."""
MAX_STOP_CHARS = 256
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS_OF = 128
MAX_TEXT_CHARS = 64 * 1024
"""A grammar; a text to be ranked."""
MAX_PROCESSORS = 8
MAX_PARAMS = 16
"""Of one logit processor."""
MAX_PARAM_ITEMS = 256 * 1024
"""Of one list among these: as many as a large vocabulary has."""
MAX_MEDIA = 64
MAX_SCORED = 4096
"""Items, inputs or pairs of one command."""
MAX_LABELS = 1024
MAX_ARRAYS = 64
"""Of one result."""
MAX_TENSORS = 100_000
MAX_DIMENSIONS = 16
MAX_BUCKETS = 4096
MAX_HANDLE_BYTES = 1024
"""What opens a bucket of GPU memory in another process."""

MAX_MARKS_BYTES = 256
"""Marks of one prompt: 32 of them."""
MAX_MARK_NEWS_BYTES = 8 * 1024
"""Marks that a worker tells of at once, of either kind: so that it travels with other entries."""

MAX_TOKENS_BYTES = 4 * 1024 * 1024
"""int32 tokens or float32 logprobs: 1,048,576 of them."""
MAX_PIECE_BYTES = 16 * 1024 * 1024
"""One array of a result; one image."""
CHUNK_BYTES = 4 * 1024 * 1024
"""Largest range pulled or pushed at once; heartbeats must never queue behind more."""
MAX_BODY_BYTES = 20 * 1024 * 1024
"""A body that travels alone. A `generate` with its prefix has four columns, their version runs,
and little besides; media and arrays must leave room for them."""
MAX_BULK_IN_BYTES = CHUNK_BYTES + 64 * 1024
"""A body that asks something of a store over its bulk socket: at most a chunk to be stored."""
MAX_FRAMES = 16
"""Of one message that are read before others get their turn; no message of ours has so many."""

MAX_DEADLINE_MS = 10**12
"""Some thirty years: what is added to it and taken from it stays an exact 64-bit number."""
MAX_ROUTER_EPOCH = 2**62

Short = Annotated[str, Meta(max_length=MAX_SHORT_CHARS)]
HeaderText = Annotated[str, Meta(max_length=MAX_HEADER_CHARS)]
Rid = Annotated[str, Meta(max_length=MAX_RID_CHARS)]
Sentence = Annotated[str, Meta(max_length=MAX_SENTENCE_CHARS)]
Field = Annotated[str, Meta(max_length=MAX_FIELD_CHARS)]
TensorName = Annotated[str, Meta(max_length=MAX_TENSOR_NAME_BYTES)]
Column = Annotated[bytes, Meta(max_length=MAX_TOKENS_BYTES)]
"""One number of four bytes per token."""
Marks = Annotated[bytes, Meta(max_length=MAX_MARKS_BYTES)]
MarkNews = Annotated[bytes, Meta(max_length=MAX_MARK_NEWS_BYTES)]
Content = Annotated[bytes, Meta(max_length=CHUNK_BYTES)]
Piece = Annotated[bytes, Meta(max_length=MAX_PIECE_BYTES)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
PathText = Annotated[str, Meta(max_length=MAX_SENTENCE_CHARS)]
"""Of a file or directory."""

Natural = Annotated[int, Meta(ge=0)]
"""0 to 2**64 - 1: MessagePack ends there."""
Count = Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
RouterEpoch = Annotated[int, Meta(ge=0, le=MAX_ROUTER_EPOCH)]
TraceParent = Annotated[
    str,
    Meta(
        max_length=55, pattern="^(00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})?\\Z"
    ),
]
"""W3C trace context: version, trace id, parent id, flags; empty: none."""
Milliseconds = Annotated[int, Meta(le=MAX_DEADLINE_MS)]
"""May be negative: a deadline that passed is refused by name, not as malformed."""
AttemptId = tuple[int, int]
"""(router epoch, n); see `bus.wire.ids.Attempt`. Compared and echoed, never reckoned with."""

Names = Annotated[list[Short], Meta(max_length=MAX_MEMBERS)]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Patterns = Annotated[list[HeaderText], Meta(max_length=MAX_PATTERNS)]
KindNames = Annotated[list[Short], Meta(max_length=MAX_KINDS)]
Rids = Annotated[list[Rid], Meta(max_length=MAX_ITEMS)]
AttemptIds = Annotated[list[AttemptId], Meta(max_length=MAX_ITEMS)]
Naturals = Annotated[list[Natural], Meta(max_length=MAX_ITEMS)]
AttemptList = Annotated[list[tuple[Rid, AttemptId]], Meta(max_length=MAX_ITEMS)]
"""[(rid, attempt)]."""
Claims = Annotated[list[tuple[Rid, AttemptId, HeaderText]], Meta(max_length=MAX_ITEMS)]
"""[(rid, attempt, client)]."""
BacklogRows = Annotated[list[tuple[HeaderText, Natural, Natural]], Meta(max_length=MAX_ITEMS)]
"""[(client, endings, bytes)]."""
Suspects = Annotated[list[tuple[Rid, Natural, Natural]], Meta(max_length=MAX_ITEMS)]
"""[(rid, crashes, crashes while nothing else ran)]."""
DetachedRids = Annotated[list[tuple[Rid, HeaderText]], Meta(max_length=MAX_ITEMS)]
"""[(rid, group)]."""
VersionRuns = Annotated[list[tuple[Natural, Natural]], Meta(max_length=MAX_ITEMS)]
"""[(version, n_tokens)] in token order: which weights computed the logits of which tokens."""
EosTokenIds = Annotated[list[int], Meta(max_length=MAX_EOS_TOKENS)]
VersionsByPolicy = Annotated[dict[Short, Natural], Meta(max_length=MAX_POLICIES)]
WavesByPolicy = Annotated[dict[Short, tuple[Natural, Natural]], Meta(max_length=MAX_POLICIES)]
TagsByPolicy = Annotated[
    dict[Short, Annotated[list[tuple[Natural, Natural]], Meta(max_length=MAX_TAGS)]],
    Meta(max_length=MAX_POLICIES),
]
SessionsByWorker = Annotated[dict[Short, Natural], Meta(max_length=MAX_MEMBERS)]
Troubles = Annotated[dict[Short, Sentence], Meta(max_length=MAX_MEMBERS)]
Counters = Annotated[dict[Short, Natural], Meta(max_length=MAX_KINDS)]
Gauges = Annotated[dict[Short, float], Meta(max_length=MAX_KINDS)]
Labels = Annotated[dict[Short, Short], Meta(max_length=MAX_KINDS)]
Reasons = Annotated[dict[Short, Sentence], Meta(max_length=MAX_KINDS)]
Columns = Annotated[list[Column], Meta(max_length=MAX_SCORED)]
"""Lists of token ids."""
Paths = Annotated[list[PathText], Meta(max_length=MAX_ITEMS)]
Digests = Annotated[list[Natural], Meta(max_length=MAX_TENSORS)]
Shape = Annotated[tuple[int, ...], Meta(max_length=MAX_DIMENSIONS)]
