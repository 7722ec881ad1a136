"""What a scheduler must know of a request beyond what SGLang's own parameters say.

It travels in the request's `custom_params`, which SGLang passes through.
"""

from collections.abc import Mapping

import msgspec

from rolloutbus.bus.wire.messages.generation import NOTHING_MORE, Want
from rolloutbus.engine_worker.engines.shared.processors import Params

RULES = "rolloutbus"
"""Key in `custom_params`."""
REQUEST = "__req__"
"""Key under which SGLang adds its own request object there."""
PROCESSOR_CLASS = "rolloutbus.engine_worker.engines.sglang.inside.row_processor", "RowProcessor"


class Penalties(msgspec.Struct, array_like=True, frozen=True):
    """All off by default."""

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


NO_PENALTIES = Penalties()


class Rules(msgspec.Struct, array_like=True, frozen=True):
    """Of one request."""

    n_kept: int = 0
    """The last tokens of what SGLang takes for the prompt were sampled by earlier attempts."""
    stop: tuple[str, ...] = ()
    """Texts that end it; they may have begun in what was kept."""
    stop_regex: tuple[str, ...] = ()
    """The same as patterns."""
    penalties: Penalties = NO_PENALTIES
    min_new_tokens: int = 0
    """Kept tokens count."""
    end_ids: tuple[int, ...] = ()
    """What may not be sampled before that."""
    processors: tuple[tuple[str, Params], ...] = ()
    """(path of the factory, parameters), in order."""
    want: Want = NOTHING_MORE
    seen_with: tuple[int, ...] = ()
    """Input tokens of a request with media: SGLang must leave them as they are."""

    @property
    def has_text(self) -> bool:
        """Whether text of its tokens may end it."""
        return bool(self.stop or self.stop_regex)

    @property
    def shapes_logits(self) -> bool:
        """Whether logits must be changed, or be looked at, by `RowProcessor`."""
        return bool(
            self.penalties != NO_PENALTIES
            or self.min_new_tokens
            or self.processors
            or self.want.sampling_mask
        )


NO_RULES = Rules()
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Rules).decode


def custom_params(rules: Rules) -> dict[str, str]:
    """Plain text, since SGLang is particular about types in there."""
    return {RULES: _encode(rules).hex()}


def rules_in(params: Mapping[str, object] | None) -> Rules:
    """What `custom_params` said; no rules if it was not used."""
    text = params.get(RULES) if params else None
    return _decode(bytes.fromhex(text)) if isinstance(text, str) else NO_RULES


def processor_text() -> str:
    """Names `RowProcessor` to SGLang, in the form that it reads; always the same text.

    SGLang wants a pickle: this one is the import of a class of ours and nothing else.
    """
    module, name = PROCESSOR_CLASS
    pickled = f"c{module}\n{name}\n.".encode()
    return msgspec.json.encode({"callable": pickled.hex()}).decode()
