"""Engines by name; a heavy dependency is imported only when its engine is built."""

from collections.abc import Callable, Mapping

import msgspec

from rolloutbus.engine_worker.engine import Engine, StepSink
from rolloutbus.engine_worker.engines.fake.engine import FakeEngine
from rolloutbus.engine_worker.engines.fake.settings import FakeSettings
from rolloutbus.engine_worker.engines.sglang.settings import SglangSettings
from rolloutbus.engine_worker.engines.transformers.settings import TransformersSettings

KINDS = ("transformers", "sglang", "fake")


def _unheard(_: str) -> None:
    """Default listener: progress is not shown."""


def build_engine(
    kind: str,
    options: Mapping[str, object],
    sink: StepSink,
    on_progress: Callable[[str], None] = _unheard,
) -> Engine:
    """Build the engine `kind` with the settings in `options`.

    Args:
        kind: one of KINDS.
        options: its settings.
        sink: gets each engine step.
        on_progress: is told what takes long, such as `loading weights`, before it begins.

    Raises:
        ValueError: unknown kind, or an option that does not fit; names it.
        ImportError: the kind's optional dependencies are not installed.
    """
    match kind:
        case "fake":
            return FakeEngine(msgspec.convert(options, FakeSettings), sink)
        case "transformers":
            settings = msgspec.convert(options, TransformersSettings)
            on_progress("importing torch and transformers")
            # Imports torch, which takes seconds and is an optional dependency.
            from rolloutbus.engine_worker.engines.transformers.engine import (  # noqa: PLC0415
                TransformersEngine,
            )

            on_progress("loading weights")
            return TransformersEngine(settings, sink)
        case "sglang":
            on_progress("starting SGLang, which loads the weights")
            # Imports sglang when it is built: seconds, and it changes the process.
            from rolloutbus.engine_worker.engines.sglang.engine import SglangEngine  # noqa: PLC0415

            return SglangEngine(msgspec.convert(options, SglangSettings), sink)
        case _:
            raise ValueError(f"engine: {kind!r} is not one of {', '.join(KINDS)}")
