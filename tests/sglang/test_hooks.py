"""The real SGLang with a function moved: the worker does not start, or promises less."""

from pathlib import Path

import pytest

import rolloutbus
from rolloutbus import RolloutClient, SamplingParams
from rolloutbus.bus.wire.messages.generation import Grammar
from rolloutbus.cli.commands.doctor import look
from rolloutbus.engine_worker.engines.sglang.upstream import hooks
from rolloutbus.engine_worker.engines.sglang.upstream.hooks import Hook
from rolloutbus.errors import EngineFailed, ProcessFailed
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.fleets import fleet_of
from tests.sglang.removed_functions import remove

pytestmark = pytest.mark.asyncio(loop_scope="session")

FEW = SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("hook", [hooks.PROCESS_BATCH_RESULT], ids=lambda h: h.target)
async def test_a_worker_does_not_start_without_what_it_must_patch(
    hook: Hook, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove(monkeypatch, hook.target)
    with pytest.raises(ProcessFailed) as failed:
        async with rolloutbus.up(**fleet_of(llama)):
            pass
    for said in (hook.target.replace(":", "."), hook.carries, *hooks.TESTED):
        assert said in str(failed.value)


async def test_a_worker_without_an_optional_one_refuses_what_it_carries(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove(monkeypatch, hooks.GRAMMAR)
    async with rolloutbus.up(**fleet_of(llama, text=True)) as fleet:
        settings = ClientSettings(name="tests", router=fleet.address, overtime_s=DEADLINE_S)
        async with RolloutClient(settings) as client:
            rollout = await client.generate([5, 6, 7], FEW, deadline_s=DEADLINE_S)
            assert len(rollout.tokens) == FEW.max_new_tokens
            grammar = Grammar("regex", "[a-z]+")
            with pytest.raises(EngineFailed, match="unsupported") as refused:
                await client.generate([5, 6, 7], FEW, grammar=grammar, deadline_s=DEADLINE_S)
            assert refused.value.problem is not None
            assert refused.value.problem.field == "grammar"
            for said in (hooks.GRAMMAR.replace(":", "."), *hooks.TESTED):
                assert said in refused.value.problem.message


async def test_the_doctor_finds_a_target_that_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    remove(monkeypatch, hooks.PROCESS_BATCH_RESULT.target, hooks.GRAMMAR)
    found = {each.name: each.state for each in look("") if each.section == "sglang"}
    assert found["Scheduler.process_batch_result"] == "failed"
    assert found["XGrammarGrammar.allocate_vocab_mask"] == "note"
    assert found["Scheduler.run_batch"] == "ok"
