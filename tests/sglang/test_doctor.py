"""`rolloutbus doctor` where SGLang is installed."""

from pathlib import Path

from rolloutbus.cli.commands.doctor import look
from rolloutbus.engine_worker.engines.sglang.upstream import hooks


def test_it_finds_sglang_its_features_and_that_it_knows_the_model(llama: Path) -> None:
    found = {f"{each.section} {each.name}": each for each in look(str(llama))}
    assert found["sglang import"].state == "ok"
    of_sglang = {name: each for name, each in found.items() if name.startswith("sglang ")}
    missed = [each.says for each in of_sglang.values() if each.state != "ok"]
    assert all(hooks.VERSION_CHECK in says for says in missed), "a tested version has the rest"
    assert {"sglang Scheduler.run_batch", "sglang attributes", "sglang version"} <= {*of_sglang}
    assert found["model sglang engine"].state == "ok"
    assert {each.state for each in found.values()} <= {"ok", "note", "missing"}
