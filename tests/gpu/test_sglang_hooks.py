"""SGLang on a GPU with a function moved: the worker does not start, and says why."""

from pathlib import Path

import pytest

import rolloutbus
from rolloutbus.engine_worker.engines.sglang.upstream import hooks
from rolloutbus.errors import ProcessFailed
from tests.gpu.gpu_fleets import gpu_fleet
from tests.gpu.tiny import save_tiny
from tests.sglang.removed_functions import remove


@pytest.mark.parametrize("hook", [hooks.PROCESS_BATCH_RESULT, hooks.DRAW], ids=lambda h: h.target)
async def test_a_worker_does_not_start_without_what_it_must_patch(
    hook: hooks.Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("llama", tmp_path)
    remove(monkeypatch, hook.target)
    with pytest.raises(ProcessFailed) as failed:
        async with rolloutbus.up(**gpu_fleet(tmp_path)):
            pass
    print(failed.value)  # the refusal, for people; shown with -s
    for said in (hook.target.replace(":", "."), hook.carries, *hooks.TESTED):
        assert said in str(failed.value)
