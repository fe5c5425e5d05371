"""The dashboard shows what the server counts."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

import rllib_llm.serving
from rllib_llm.serving.service import LiveWeights, Metrics, ServedWeights

DASHBOARD = Path(rllib_llm.serving.__file__).with_name("dashboard.json")
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def labels_by_name() -> dict[str, set[str]]:
    """The labels of every series that the server has."""
    metrics = Metrics()
    metrics.success.labels("stop")
    metrics.refusals.labels("queue")
    metrics.lane_rows.labels("0.0")
    found = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        labels = {label for sample in family.samples for label in sample.labels}
        found |= {family.name + suffix: labels for suffix in SUFFIXES[family.type]}
    return found


def test_the_dashboard_is_grafana_s_and_names_what_is_there():
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= dashboard.keys()
    (variable,) = dashboard["templating"]["list"]
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 8
    places = set()
    for panel in panels:
        assert panel["datasource"] == {"type": "prometheus", "uid": f"${{{variable['name']}}}"}
        assert panel["title"] and panel["type"] and panel["fieldConfig"]["defaults"]["unit"]
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"])
                 for y in range(at["y"], at["y"] + at["h"])}  # fmt: skip
        assert not cells & places and at["x"] + at["w"] <= 24  # the width of Grafana's grid
        places |= cells
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    known, shown = labels_by_name(), set()
    for expression in (target["expr"] for panel in panels for target in panel["targets"]):
        names = re.findall(r"rllib_llm_\w+", expression)
        assert names and set(names) <= known.keys(), expression
        shown |= set(names)
        for label in re.findall(r"by \((\w+)\)", expression):
            assert all(label in known[name] for name in names), expression
        assert expression.count("(") == expression.count(")")
    for topic in ("time_to_first_token", "num_requests_waiting", "weights_version", "lane_rows",
                  "weights_load", "framework", "generation_tokens", "request_success"):  # fmt: skip
        assert any(topic in name for name in shown), topic


def test_weights_that_came_from_a_run_are_counted_with_their_bytes_and_seconds():
    metrics, now = Metrics(), time.time()
    of_folder = ServedWeights(1, 0, 0, "f", "a folder", load_seconds=1.0, loaded_at=now - 60)
    of_run = ServedWeights(2, 1, 1, "f", "run a", 10, 0.5, load_seconds=1.0, loaded_at=now - 30)
    for weights in (of_folder, of_run):
        metrics.swapped(weights)
    text = metrics.text(LiveWeights("tiny", of_run), None).decode()
    told = {sample.name: sample.value for family in text_string_to_metric_families(text)
            for sample in family.samples}  # fmt: skip
    assert told["rllib_llm_weights_swaps_total"] == 2
    assert told["rllib_llm_weights_transferred_bytes_total"] == 10
    assert told["rllib_llm_weights_transfer_seconds_sum"] == 0.5
    assert told["rllib_llm_weights_transfer_seconds_count"] == 1
    assert told["rllib_llm_weights_age_seconds"] >= 30
