"""infra/monitoring: expressions of metrics that Ray exports, and alerts that lead somewhere."""

import inspect
import json
import re
import shutil
import subprocess
from pathlib import Path

import promql_parser
import pytest
import ray
import yaml

from orchestrator.launch.prometheus_gauges import GAUGES, PARTS

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
ALERTS = yaml.safe_load((INFRA / "monitoring/alerts.yaml").read_text())
DASHBOARD = json.loads((INFRA / "monitoring/dashboard.json").read_text())


def expressions() -> dict[str, str]:
    rules = {rule["alert"]: rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]}
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            rules[f"{panel['title']}/{target['refId']}"] = target["expr"].replace("$cluster", ".+")
    return rules


@pytest.mark.parametrize("name", expressions())
def test_expressions_are_promql_over_metrics_that_ray_exports(name: str) -> None:
    expression = expressions()[name]
    promql_parser.parse(expression)
    exported = ray_metrics()
    used = set(re.findall(r"\b(?:ray|autoscaler)_(?!io_cluster)\w+", expression))
    assert used <= exported
    assert used or "up{" in expression


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Prometheus, is not on PATH")
def test_alerts_fire_in_their_cases_and_in_no_other() -> None:
    for words in (
        ["check", INFRA / "monitoring/alerts.yaml"],
        ["test", ROOT / "tests/fixtures/alert_cases.yaml"],
    ):
        done = subprocess.run(["promtool", words[0], "rules", words[1]], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def ray_metrics() -> set[str]:
    """Names that Ray's own dashboard asks for, those its autoscaler declares, and those of runs."""
    home = Path(inspect.getfile(ray)).parent
    panels = "".join(
        p.read_text() for p in (home / "dashboard/modules/metrics/dashboards").glob("*_panels.py")
    )
    ours = {f"ray_{name}" for name in (*GAUGES, PARTS)}
    return ours | set(re.findall(r"\b(?:ray|autoscaler)_\w+", panels))


@pytest.mark.parametrize("name", ["head", "worker"])
def test_pods_of_a_run_are_scraped_wherever_they_are(name: str) -> None:
    """By labels and ports that a render writes itself."""
    (monitor,) = [
        m["spec"]
        for m in yaml.safe_load_all((INFRA / "monitoring/podmonitors.yaml").read_text())
        if m["metadata"]["name"].removesuffix("s") == f"ray-{name}"
    ]
    job = yaml.safe_load((INFRA / "kuberay/quickstart/rayjob.yaml").read_text())["spec"]
    cluster = job["rayClusterSpec"]
    templates = {
        "head": cluster["headGroupSpec"]["template"],
        "worker": cluster["workerGroupSpecs"][0]["template"],
        "submitter": job["submitterPodTemplate"],
    }
    wanted = monitor["selector"]["matchLabels"].items()
    assert [n for n, t in templates.items() if wanted <= t["metadata"]["labels"].items()] == [name]
    ports = {port["name"] for c in templates[name]["spec"]["containers"] for port in c["ports"]}
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} == ports - {
        *("gcs-server", "client", "dashboard")
    }
    assert monitor["namespaceSelector"] == {"any": True}
    assert "training-orchestrator/run" in templates[name]["metadata"]["labels"]


def test_the_guide_makes_the_rules_an_object_of_the_operator() -> None:
    guide = (ROOT / "docs/guides/spot-cluster.md").read_text()
    (command,) = re.findall(r"\{ printf .*?; \} (?=\| kubectl apply -f -)", guide, re.DOTALL)
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    made = yaml.safe_load(done.stdout)
    assert (made["kind"], made["metadata"]["namespace"]) == ("PrometheusRule", "monitoring")
    assert made["spec"] == ALERTS


def test_alerts_lead_to_a_section_of_the_runbook() -> None:
    headings = re.findall(r"^## (.+)$", (INFRA / "RUNBOOK.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        path, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert (path, anchor in anchors) == ("infra/RUNBOOK.md", True), rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_the_dashboard_has_no_overlap_and_no_fixed_source() -> None:
    cells = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in DASHBOARD["panels"]]
    assert len(set(cells)) == len(cells)
    assert len({p["id"] for p in DASHBOARD["panels"]}) == len(cells)
    assert all(p["datasource"]["uid"] == "${source}" for p in DASHBOARD["panels"])
