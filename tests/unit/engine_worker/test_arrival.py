"""Pieces come in any order and from anybody; what was found right is never asked for again."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from rolloutbus.bus.weights.manifest import lay_out
from rolloutbus.bus.wire.limits import CHUNK_BYTES
from rolloutbus.bus.wire.messages.weights import Tensor
from rolloutbus.engine_worker.weights.arrival import Arrival, AskedBytes, Layout

sizes = st.lists(
    st.sampled_from([0, 1, 63, 64, 1000, CHUNK_BYTES - 64, CHUNK_BYTES, 3 * CHUNK_BYTES + 5]),
    min_size=1,
    max_size=8,
)


def tensors_of(sizes_bytes: list[int]) -> list[Tensor]:
    return lay_out((f"t{i}", "U8", (size,)) for i, size in enumerate(sizes_bytes))


def pieces_of(arrival: Arrival) -> list[AskedBytes]:
    pieces: list[AskedBytes] = []
    while piece := arrival.take_piece():
        pieces.append(piece)
    return pieces


@given(sizes, st.randoms())
def test_each_tensor_is_to_be_checked_once_all_its_bytes_are_here(
    sizes_bytes: list[int], random: Random
) -> None:
    tensors = tensors_of(sizes_bytes)
    arrival = Arrival(tensors)
    pieces = pieces_of(arrival)
    random.shuffle(pieces)
    here: set[AskedBytes] = set()
    seen: set[int] = set()
    for piece in [None, *pieces]:
        if piece is not None:
            arrival.came(piece, 0)
            here.add(piece)
        while ready := arrival.to_check(1):
            tensor = tensors[ready[0]]
            for other in set(pieces) - here:
                end = other.offset + other.size_bytes
                is_apart = other.offset >= tensor.offset + tensor.size_bytes
                assert is_apart or end <= tensor.offset or not tensor.size_bytes
            assert ready[0] not in seen
            seen.add(ready[0])
            arrival.found_right(1)
    assert arrival.is_complete
    assert seen == set(range(len(tensors)))


@given(sizes)
def test_pieces_cover_every_byte_of_a_version_once(sizes_bytes: list[int]) -> None:
    tensors = tensors_of(sizes_bytes)
    end = 0
    for piece in pieces_of(Arrival(tensors)):
        assert piece.offset == end
        assert 0 < piece.size_bytes <= CHUNK_BYTES
        end += piece.size_bytes
    assert end == max(each.offset + each.size_bytes for each in tensors)


def test_only_the_bytes_of_a_wrong_tensor_are_wanted_again() -> None:
    tensors = tensors_of([100, CHUNK_BYTES, 100])
    arrival = Arrival(tensors)
    for giver, piece in enumerate(pieces_of(arrival)):
        arrival.came(piece, giver)
    assert arrival.to_check(1 << 30) == [0, 1, 2]
    arrival.found_right(1)
    assert arrival.found_wrong() == {0, 1}
    assert pieces_of(arrival) == [AskedBytes(tensors[1].offset, tensors[1].size_bytes)]
    arrival.came(AskedBytes(tensors[1].offset, tensors[1].size_bytes), 2)
    assert arrival.to_check(1 << 30) == [2, 1]
    arrival.found_right(2)
    assert arrival.is_complete


def test_a_piece_that_was_not_had_is_wanted_first() -> None:
    arrival = Arrival(tensors_of([3 * CHUNK_BYTES]))
    piece = arrival.take_piece()
    assert piece is not None
    arrival.put_back(piece)
    assert arrival.take_piece() == piece


def test_a_range_between_tensors_touches_none() -> None:
    tensors = tensors_of([1, 1])
    assert list(Layout(tensors).touched(1, 63)) == []
    assert list(Layout(tensors).touched(0, 65)) == [(0, 1), (1, 1)]
