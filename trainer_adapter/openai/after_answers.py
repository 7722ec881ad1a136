"""What a chat template writes after an answer, found by rendering; the answer itself is left alone.

Templates differ in how they end a turn, and some write a turn otherwise once another one follows:
they leave its reasoning out, or put what a tool answered into it.
"""

from collections.abc import Callable, Sequence

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.trainer_adapter.client.text import Tokenizer
from rolloutbus.trainer_adapter.openai.bodies import Json, unsupported

Render = Callable[[Sequence[Json]], str]
N_CLOSING_CHARS = 200
"""More than any template ends a turn with."""
_MARK = "rolloutbus-7b1d0c5e"
"""Stands for a text where a template is tried out."""
_ANSWER = f"{_MARK}-answer"
_MARKED: Json = {"role": "assistant", "content": _ANSWER}


class AfterAnswers:
    """Asks one chat template."""

    def __init__(
        self, tokenizer: Tokenizer, special_ids: Sequence[int], render_ended: Render
    ) -> None:
        """Nothing is rendered yet.

        Args:
            tokenizer: of the model.
            special_ids: tokens that are no text.
            render_ended: messages as text, without the beginning of an answer.
        """
        self._tokenizer = tokenizer
        self._special_ids = frozenset(special_ids)
        self._ended = render_ended

    def tokens(
        self, messages: Sequence[Json], i: int, text: str, render: Render, last: int
    ) -> list[int]:
        """Token ids of what stands after message `i`, an answer.

        Args:
            messages: all of them.
            i: index of the answer.
            text: all messages, rendered.
            render: how they were rendered.
            last: token that the answer ends with.

        Raises:
            Refused: the template does not tell.
        """
        rest = self._as_it_stands(messages, i, text, last)
        if rest is None:
            marked = self._after_a_mark(messages, i, render)
            rest = None if marked is None else self._encoded(marked)
        if rest is None:
            message = (
                "this model's chat template writes earlier turns otherwise when a conversation "
                "goes on, so sampled tokens cannot be kept; leave session_id out"
            )
            raise unsupported("session_id", message)
        # The model may have ended its turn itself.
        is_there = bool(rest) and rest[0] == last and last in self._special_ids
        return rest[1:] if is_there else rest

    def _as_it_stands(
        self, messages: Sequence[Json], i: int, text: str, last: int
    ) -> list[int] | None:
        """Where the text with the answer as its end is the beginning of all, or nearly so."""
        try:
            before = self._ended(messages[: i + 1])
            if text.startswith(before):
                closing = self._closing(messages, i, before, last)
                return self._encoded(closing + text[len(before) :])
        except Refused:  # some templates want a conversation to end otherwise
            return None
        ended, going_on = self._encoded(before), self._encoded(text)
        n = 0
        while n < min(len(ended), len(going_on)) and ended[n] == going_on[n]:
            n += 1
        is_closing = not self._tokenizer.decode(
            [token for token in ended[n:] if token not in self._special_ids],
            skip_special_tokens=False,
        ).strip()
        return going_on[n:] if is_closing else None

    def _closing(self, messages: Sequence[Json], i: int, before: str, last: int) -> str:
        """How the template ends the answer that is the last thing in `before`."""
        tokens = self._encoded(before[-N_CLOSING_CHARS:])
        if last in self._special_ids and last in tokens:
            end = self._decoded([last])
            _, found, tail = before.rpartition(end)
            if found and not tail.strip():
                return end + tail
        _, mark, tail = self._ended([*messages[:i], _MARKED]).rpartition(_ANSWER)
        if mark and before.endswith(tail):
            return tail
        # Calls may end otherwise than a text does.
        special = [n for n, token in enumerate(tokens) if token in self._special_ids]
        end_tokens = tokens[special[-1] :] if special else []
        is_end = not self._decoded(end_tokens[1:]).strip()
        return self._decoded(end_tokens) if is_end else ""

    def _after_a_mark(self, messages: Sequence[Json], i: int, render: Render) -> str | None:
        """What follows a text that stands for the answer, if no message is lost by that."""
        head, later = messages[:i], messages[i + 1 :]
        marks = [f"{_MARK}-{n}" for n in range(len(later))]
        marked = [{**each, "content": mark} for each, mark in zip(later, marks, strict=True)]
        try:
            _, mark, rest = render([*head, _MARKED, *later]).rpartition(_ANSWER)
            after = render([*head, _MARKED, *marked]).rpartition(_ANSWER)[2]
            whole = render([*head, messages[i], *marked])
        except Refused:
            return None
        is_lost = any(each in whole and each not in after for each in marks)
        return rest if mark and not is_lost else None

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))
