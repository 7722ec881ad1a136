"""What a gateway is told."""

from typing import Annotated

import msgspec

MIB = 1024 * 1024


class GatewaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One gateway in front of one fleet."""

    served_model_name: str = "default"
    """What requests call the model of the policy `default`."""
    model_path: str = ""
    """Directory of the model; requests may call it so, too."""
    tool_format: str = ""
    """How the model writes tool calls; empty: as its tokenizer says."""
    default_max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 1024
    """For bodies of OpenAI's endpoints that do not say it."""
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 64 * MIB
    """Of a request."""

    @property
    def served_names(self) -> list[str]:
        """All names of the policy `default`."""
        return [self.served_model_name, *filter(None, [self.model_path])]
