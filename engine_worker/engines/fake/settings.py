"""What a test chooses about the fake engine: its costs and its faults."""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0)]


class FakeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of one fake engine."""

    slots: Annotated[int, msgspec.Meta(ge=1)] = 256
    max_context: Annotated[int, msgspec.Meta(ge=2)] = 32_768
    step_s: Seconds = 0.0
    """What a step costs, whatever runs."""
    step_s_per_request: Seconds = 0.0
    """What each running request adds to a step."""
    prefill_s_per_token: Seconds = 0.0
    """What each prompt token adds to its request's first step, unless its prompt is cached."""
    slow_after_steps: Count = 0
    """From this step on every step costs `slow_factor` times as much; 0: never."""
    slow_factor: Annotated[float, msgspec.Meta(ge=1.0)] = 10.0
    hang_after_steps: Count = 0
    """This step never ends; 0: none."""
    fail_after_steps: Count = 0
    """This step raises; 0: none."""
    exit_after_steps: Count = 0
    """This step ends the process at once; 0: none."""
    exit_code: int = 70
    poison_token: int | None = None
    """The step that would answer a prompt which begins with this token aborts the process."""
    hold_gil_after_steps: Count = 0
    """This step never ends, and no other thread of the process runs any more; 0: none."""
    hold_file: str = ""
    """While there is such a file, no request gets more tokens than the number in it; "": never."""
