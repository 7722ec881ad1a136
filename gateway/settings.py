"""What a gateway is told."""

from pathlib import Path
from typing import Annotated, Any

import msgspec

from rolloutbus.bus.wire.near_names import nearest
from rolloutbus.trainer_adapter.openai.bodies import ChatBody

MIB = 1024 * 1024


Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class GatewaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One gateway in front of one fleet."""

    router: str
    """Where clients connect; several routers are separated by commas."""
    key_file: str = ""
    """Key of the gateway's client; empty: the router asks for none."""
    http_keys: str = ""
    """File of the API keys that it asks HTTP clients for, instead of `key_file`: each request is
    asked for as the principal of its key. Empty: it asks for none."""
    host: str = "127.0.0.1"
    """A loopback address, unless it asks for API keys."""
    port: Port = 8000
    """0: a free one."""
    model_path: str = ""
    """Directory of the model, for its tokenizer; requests may call the model so, too. Empty: token
    ids only."""
    served_model_name: str = ""
    """What requests call the model of the policy `default`; empty: the directory's name."""
    tool_format: str = ""
    """How the model writes tool calls; empty: as its tokenizer says, or as is recognised."""
    reasoning_format: str = ""
    """How it writes reasoning; empty: the same."""
    default_max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 1024
    """For bodies of OpenAI's endpoints that do not say it."""
    chat_defaults: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Fields of every chat that does not say them, e.g. `{"logprobs": true}`."""
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 64 * MIB
    """Of a request."""
    weights_root: str = ""
    """Directory below which `/update_weights_from_disk` may name checkpoints; empty: none."""
    only_metrics: bool = False
    """Answer `/metrics` and nothing else."""
    stall_s: Annotated[float, msgspec.Meta(ge=0.1, le=86_400)] = 120.0
    """A reader that takes nothing for so long is cut off, and its request aborted."""
    drain_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 5.0
    """Once it is to end it takes no more, and requests under way may take so long to end; then they
    answer what they have."""
    exit_with_parent: bool = False
    """End when the process that started it ends."""

    def __post_init__(self) -> None:
        for name in self.chat_defaults:
            if name not in ChatBody.__struct_fields__:
                near = nearest(name, ChatBody.__struct_fields__)
                hint = f"; did you mean {near}?" if near else ""
                raise ValueError(f"chat_defaults: {name[:64]!r} is no field of a chat{hint}")

    @property
    def served_names(self) -> list[str]:
        """All names of the policy `default`, the one to be shown first."""
        name = self.served_model_name or Path(self.model_path).name or "default"
        return [name, *filter(None, [self.model_path])]
