"""The page and the dashboard have the metrics that `/metrics` has."""

import json
import re
from collections.abc import Iterator
from typing import Any

from docs.list_metrics import PAGE, example, page
from tests.architecture.source_tree import ROOT

DASHBOARD = ROOT / "deploy" / "grafana" / "rolloutbus.json"
COLUMNS = 24
"""Of Grafana's grid."""


def _panels() -> list[Any]:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]


def _queries(value: Any) -> Iterator[str]:  # noqa: ANN401 - any part of the file
    if isinstance(value, dict):
        for name, each in value.items():  # pyright: ignore[reportUnknownVariableType]
            if name in ("expr", "definition", "query") and isinstance(each, str):
                yield each
            yield from _queries(each)
    elif isinstance(value, list):
        for each in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _queries(each)


def test_the_page_lists_every_metric() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    text = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    there = {sample.name for family in example() for sample in family.samples}
    asked = {name for query in _queries(text) for name in re.findall(r"\brolloutbus_\w+", query)}

    assert asked - there == set()
    assert len(asked) > 30


def test_the_dashboard_asks_for_labels_that_exist() -> None:
    labels = {name for family in example() for each in family.samples for name in each.labels}
    shown = {
        label
        for panel in _panels()
        for target in panel.get("targets", [])
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"])
    }

    assert shown <= labels | {"instance"}


def test_the_dashboards_panels_fit_the_grid() -> None:
    taken: set[tuple[int, int]] = set()
    panels = _panels()
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= COLUMNS, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            refs = [target["refId"] for target in panel["targets"]]
            assert len(set(refs)) == len(refs) > 0, panel["title"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
