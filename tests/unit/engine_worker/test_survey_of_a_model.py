"""What `doctor` says of a directory that is no model."""

from pathlib import Path

from rolloutbus.engine_worker.engines.survey.model import model


def test_a_directory_that_is_not_there_is_told_in_a_sentence(tmp_path: Path) -> None:
    (finding,) = model(tmp_path / "nope")
    assert finding.state == "failed"
    assert "nope is no directory" in finding.says
    assert "Errno" not in finding.says
    (finding,) = model(tmp_path)
    assert "holds no readable config.json" in finding.says
