import json

from typer.testing import CliRunner

from tests.drills.simulation.__main__ import app


def test_one_seed_prints_one_json_object() -> None:
    result = CliRunner().invoke(app, ["--seed", "5", "--json"])
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    assert (summary["seeds"], summary["violations"]) == (1, 0)
    assert summary["executions_per_request"] >= 1
