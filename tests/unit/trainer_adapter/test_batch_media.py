"""What each prompt of a batch shows: the media of all, or its own."""

import pytest

from rolloutbus import Media, SamplingParams
from rolloutbus.bus.wire.messages.generation import Generate
from rolloutbus.errors import Refused
from rolloutbus.trainer_adapter.client.asks import batch_prompts

SAMPLING = SamplingParams(max_new_tokens=4)
ONE, OTHER = Media("image", b"one"), Media("video", b"other")


def _media_of(media: list[Media] | list[list[Media]]) -> list[list[Media]]:
    found: list[list[Media]] = []
    for each in batch_prompts([[1], [2]], SAMPLING, 2, media=media):
        for ask in each.asks(2):
            assert isinstance(ask.body, Generate)
            found.append(list(ask.body.media))
    return found


def test_a_list_of_media_is_for_every_prompt() -> None:
    assert _media_of([ONE, OTHER]) == [[ONE, OTHER]] * 4
    assert _media_of([]) == [[]] * 4


def test_a_list_of_lists_has_one_for_each_prompt() -> None:
    assert _media_of([[ONE], [OTHER, ONE]]) == [[ONE]] * 2 + [[OTHER, ONE]] * 2
    assert _media_of([[], [OTHER]]) == [[]] * 2 + [[OTHER]] * 2


@pytest.mark.parametrize("media", [[[ONE]], [[ONE], [ONE], [ONE]]])
def test_a_list_of_another_length_is_refused(media: list[list[Media]]) -> None:
    with pytest.raises(Refused) as caught:
        _media_of(media)
    assert caught.value.problem.field == "media"
