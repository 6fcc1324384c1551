"""The memory of a reduction: made on first use, and held once."""

import pytest

from atoll.optim.state.vectors import joined_bytes
from atoll.peer.rounds.allreduce.reduction import PartBytes, Rooms, batches

VALUES = (slice(0, 4), slice(4, 10))


def filled(rooms, *bodies):
    """The bytes of parts that came in two pieces each."""
    places = [rooms.room(part).bytes() for part in range(len(bodies))]
    for place, body in zip(places, bodies, strict=True):
        place.add(body[:1])
        place.add(body[1:])
    return [place.whole() for place in places]


def test_a_room_takes_no_memory_before_it_is_used():
    rooms = Rooms(VALUES, [3, 5])
    place = rooms.room(1)
    assert not rooms.is_made
    place.values()
    assert rooms.is_made


def test_values_of_parts_lie_in_one_vector():
    rooms = Rooms(VALUES, [3, 5])
    first_N, second_N = rooms.room(0).values(), rooms.room(1).values()
    assert (len(first_N), len(second_N)) == (4, 6)
    assert first_N.untyped_storage().data_ptr() == second_N.untyped_storage().data_ptr()


def test_bodies_that_fill_their_rooms_are_joined_without_a_copy():
    parts = filled(Rooms(VALUES, [3, 5]), b"abc", b"defgh")
    whole = joined_bytes(parts)
    assert whole == b"abcdefgh"
    assert whole.obj is parts[0].obj
    assert joined_bytes([whole[:2], whole[2:7]]).obj is whole.obj
    assert joined_bytes([whole[:2], whole[2:7]]) == b"abcdefg"


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_bodies_that_do_not_lie_in_order_are_joined_by_a_copy(order):
    parts = filled(Rooms(VALUES, [3, 5]), b"ab", b"defgh")
    assert joined_bytes([parts[i] for i in order]) == b"".join(bytes(parts[i]) for i in order)


def test_bodies_of_several_memories_are_joined_by_a_copy():
    one, other = (filled(Rooms(VALUES, [3, 5]), b"abc", b"defgh") for _ in range(2))
    assert joined_bytes([one[0], other[1]]) == b"abcdefgh"
    assert joined_bytes([b"abc", one[1]]) == b"abcdefgh"
    assert joined_bytes([]) == joined_bytes([b""]) == b""


def test_pieces_without_a_room_are_kept_apart():
    place = PartBytes()
    assert place.add(b"ab") == b"ab"
    place.add(b"c")
    assert place.whole() == b"abc"


def test_what_is_kept_cannot_be_changed():
    (part,) = filled(Rooms(VALUES[:1], [3]), b"abc")
    with pytest.raises(TypeError):
        part[0] = 0


def test_messages_are_made_as_they_are_sent():
    taken = []

    def frames():
        for number in range(10):
            taken.append(number)
            yield bytes(40)

    messages = batches(frames(), 100)
    assert taken == []
    assert len(next(messages)) == 80
    assert taken == [0, 1, 2]
