import contextlib
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rolloutbus.bus.weights.manifest import Bytes, bytes_of, digest_of, lay_out, total_bytes
from rolloutbus.bus.weights.side_by_side import first_mismatch
from rolloutbus.bus.weights.weight_delta import apply, check_parts, encode
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.weights import DeltaPart, Tensor

LAYOUT = lay_out(
    [
        ("norm", "F32", (3,)),
        ("dense", "BF16", (64, 64)),
        ("empty", "F16", (0, 4)),
        ("mask", "BOOL", (1001,)),
        ("scale", "F64", ()),
        ("embed", "F32", (640, 64)),
    ]
)
SIZE_BYTES = total_bytes(LAYOUT)


def sealed(content: Bytes, layout: Sequence[Tensor] = LAYOUT) -> list[Tensor]:
    return [
        msgspec.structs.replace(each, digest=digest_of(bytes_of(content, each))) for each in layout
    ]


def random_bytes(seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, SIZE_BYTES, np.uint8)


def changed(base: Bytes, share: float, seed: int) -> Bytes:
    chance = np.random.default_rng(seed)
    return base ^ (chance.random(SIZE_BYTES) < share).astype(np.uint8)


@given(seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.0, 1e-4, 1e-2, 0.1, 0.3, 0.7, 1.0]))
def test_the_base_and_the_delta_make_the_new_version(seed: int, share: float) -> None:
    base = random_bytes(seed)
    new = changed(base, share, seed)
    tensors = sealed(new)
    delta = encode(base, sealed(base), new, tensors)
    assert delta is not None
    content = base.copy()
    apply(content, tensors, delta.parts, delta.content)
    assert first_mismatch(content, tensors) is None


@pytest.mark.parametrize(
    ("share", "encoding"), [(0.001, "sparse"), (0.3, "xor")], ids=["few", "many"]
)
def test_each_tensor_takes_the_smaller_encoding(share: float, encoding: str, seed: int) -> None:
    base = random_bytes(seed)
    new = base.copy()
    embed = LAYOUT[-1]
    bytes_of(new, embed)[:] = bytes_of(changed(base, share, seed), embed)
    delta = encode(base, sealed(base), new, sealed(new))
    assert delta is not None
    assert [(each.tensor, each.encoding) for each in delta.parts] == [(5, encoding)]
    assert len(delta.content) < embed.size_bytes / 2


def test_a_tensor_that_is_new_throughout_travels_whole(seed: int) -> None:
    base, new = random_bytes(seed), random_bytes(seed + 1)
    bytes_of(new, LAYOUT[-1])[:] = bytes_of(base, LAYOUT[-1])
    delta = encode(base, sealed(base), new, sealed(new))
    assert delta is not None
    assert {each.encoding for each in delta.parts if each.size_bytes > 100} == {"full"}


def test_equal_versions_have_an_empty_delta(seed: int) -> None:
    base = random_bytes(seed)
    delta = encode(base, sealed(base), base.copy(), sealed(base))
    assert delta is not None
    assert (delta.parts, len(delta.content)) == ([], 0)


def test_there_is_no_delta_that_is_no_smaller_than_the_version(seed: int) -> None:
    base, new = random_bytes(seed), random_bytes(seed + 1)
    # Without the gaps between tensors there is nothing to win.
    layout = [LAYOUT[-1]]
    moved = [msgspec.structs.replace(each, offset=0) for each in layout]
    size = layout[0].size_bytes
    olds, news = sealed(base[:size], moved), sealed(new[:size], moved)
    assert encode(base[:size], olds, new[:size], news) is None


def test_versions_of_different_tensors_have_no_delta(seed: int) -> None:
    base = random_bytes(seed)
    other = lay_out([("norm", "F32", (4,))])
    assert encode(base, sealed(base), base, sealed(base, other)) is None


def test_a_base_laid_out_elsewhere_is_compared_tensor_by_tensor(seed: int) -> None:
    base = random_bytes(seed)
    shifted = np.concatenate([np.zeros(64, np.uint8), base])
    moved = [msgspec.structs.replace(each, offset=each.offset + 64) for each in LAYOUT]
    delta = encode(shifted, sealed(shifted, moved), base, sealed(base))
    assert delta is not None
    assert delta.parts == []


@pytest.mark.parametrize(
    "parts",
    [
        [DeltaPart(6, "full", 0, 4)],
        [DeltaPart(1, "full", 0, 4), DeltaPart(1, "full", 4, 4)],
        [DeltaPart(2, "full", 0, 4), DeltaPart(1, "full", 4, 4)],
        [DeltaPart(0, "zip", 0, 4)],
        [DeltaPart(0, "xor", 0, 101)],
        [DeltaPart(0, "xor", 2**64 - 1, 4)],
        [DeltaPart(0, "xor", 0, 50), DeltaPart(1, "xor", 49, 4)],
    ],
    ids=["no tensor", "twice", "descending", "unknown", "too long", "too far", "overlapping"],
)
def test_parts_that_are_out_of_place_are_refused(parts: list[DeltaPart]) -> None:
    with pytest.raises(RemoteProtocolError):
        check_parts(parts, 100, LAYOUT)


def test_a_delta_as_large_as_its_version_is_refused_before_it_is_pulled() -> None:
    with pytest.raises(RemoteProtocolError):
        check_parts([], SIZE_BYTES, LAYOUT)


def sparse(n_changed: int, gaps: list[int], n_values: int) -> bytes:
    plain = n_changed.to_bytes(4, "little") + np.array(gaps, np.uint32).tobytes()
    return zstandard.compress(plain + bytes(4 * n_values))


@pytest.mark.parametrize(
    ("encoding", "piece"),
    [
        ("full", b"short"),
        ("xor", b"not zstd"),
        ("xor", zstandard.compress(bytes(11))),
        ("xor", zstandard.compress(bytes(13))),
        ("xor", zstandard.compress(bytes(12))[:-2]),
        ("sparse", zstandard.compress(b"")),
        ("sparse", sparse(4, [0, 1, 1, 1], 4)),
        ("sparse", sparse(2**32 - 1, [], 0)),
        ("sparse", sparse(1, [3], 1)),
        ("sparse", sparse(2, [2**32 - 1, 2**32 - 1], 2)),
        ("sparse", sparse(2, [1, 0], 2)),
        ("sparse", sparse(2, [1, 1], 1)),
        ("sparse", sparse(2, [1, 1], 3)),
    ],
)
def test_malformed_pieces_are_refused_by_name(encoding: str, piece: bytes) -> None:
    content = np.zeros(SIZE_BYTES, np.uint8)
    delta = np.frombuffer(piece, np.uint8)
    with pytest.raises(RemoteProtocolError):
        apply(content, LAYOUT, [DeltaPart(0, encoding, 0, len(piece))], delta)
    assert not content[LAYOUT[0].size_bytes :].any()


def test_a_frame_that_claims_much_allocates_little() -> None:
    bomb = zstandard.compress(bytes(1 << 28))
    content = np.zeros(SIZE_BYTES, np.uint8)
    with pytest.raises(RemoteProtocolError):
        apply(content, LAYOUT, [DeltaPart(0, "xor", 0, len(bomb))], np.frombuffer(bomb, np.uint8))


@given(
    st.lists(
        st.builds(
            DeltaPart,
            st.integers(0, 7),
            st.sampled_from(["full", "xor", "sparse", "what"]),
            st.integers(0, 300),
            st.integers(0, 300),
        ),
        max_size=4,
    ),
    st.binary(max_size=300),
    st.booleans(),
)
def test_whatever_is_said_writes_inside_or_is_refused(
    parts: list[DeltaPart], noise: bytes, is_frame: bool
) -> None:
    delta = zstandard.compress(noise) if is_frame else noise
    guard = np.full(SIZE_BYTES + 128, 7, np.uint8)
    content = guard[64:-64]
    with contextlib.suppress(RemoteProtocolError):
        apply(content, LAYOUT, parts, np.frombuffer(delta, np.uint8))
    assert (guard[:64] == 7).all()
    assert (guard[-64:] == 7).all()
