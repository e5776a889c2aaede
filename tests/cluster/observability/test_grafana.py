"""The dashboard under conf/grafana: it shows every metric there is, and a real Prometheus answers every query of it."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from actors.drafters.model.config import ModelDrafterConfig
from actors.options import PipelineConfig, PipelineName, SamplingConfig
from cluster.config.jobs import GenerateConfig
from cluster.config.schema import ClusterConfig, ClusterName
from cluster.jobs import generate
from cluster.observability.metrics import MetricsWatch
from tests.cluster.observability.test_metrics import LABELS, Registry

GRAFANA = Path(__file__).parents[3] / "conf" / "grafana"
DASHBOARD = json.loads((GRAFANA / "specdec.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = {f"{panel['title']} {target['refId']}": target["expr"] for panel in PANELS for target in panel["targets"]}
WAIT_S = 90
CLUSTER = ClusterConfig(ClusterName.local, num_cpus=2, oversubscribe=True, namespace="grafana")


# --- the file -------------------------------------------------------------------------------------------------------


def test_panels_have_places_of_their_own_and_say_what_they_show():
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells
    assert all(panel["description"] and panel["targets"] for panel in PANELS)
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in PANELS), "the user's own Prometheus"


def test_every_metric_is_shown_and_nothing_else():
    registry = Registry()
    MetricsWatch(registry, LABELS)
    made = {f"ray_{name}" for name in registry.described}
    shown = set()
    for expression in QUERIES.values():
        shown |= {name.removesuffix("_bucket") for name in re.findall(r"\bray_\w+", expression)}
    assert shown == made


def test_queries_ask_for_labels_that_the_metrics_bear():
    """A query of a metric that does not exist returns nothing, without an error."""
    registry = Registry()
    MetricsWatch(registry, LABELS)
    for title, expression in QUERIES.items():
        for name, matchers in re.findall(r"ray_(\w+?)(?:_bucket)?\{(.*?)\}", expression):
            assert set(re.findall(r"(\w+)=", matchers)) <= set(registry.labels[name]), title
        for grouped, name in re.findall(r"by \((.*?)\)\((?:rate\(|increase\()?ray_(\w+?)(?:_bucket)?\{", expression):
            assert set(grouped.split(", ")) - {"le"} <= set(registry.labels[name]), title
        grouped = "sum by (" in expression
        assert not grouped or "vector(0)" not in expression, f"{title}: a nameless series beside those with a label"


# --- a live run -----------------------------------------------------------------------------------------------------


class Prometheus:
    """Debian's, with the shipped configuration, scraping every second."""

    def __init__(self, session: Path, home: Path) -> None:
        self.session = session
        discovery = session / "prom_metrics_service_discovery.json"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        recipe = (GRAFANA / "prometheus.yml").read_text()
        assert "/tmp/ray/prom_metrics_service_discovery.json" in recipe
        config = yaml.safe_load(recipe.replace("/tmp/ray/prom_metrics_service_discovery.json", str(discovery)))
        config["global"]["scrape_interval"] = "1s"
        (home / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = ["prometheus", "--config.file=prometheus.yml", f"--web.listen-address={self._address}"]
        log = (home / "prometheus.log").open("w")
        self.process = subprocess.Popen([*command, "--storage.tsdb.path=data"], cwd=home, stdout=log, stderr=log)

    def ask(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """The series of an expression, as Grafana would see them."""
        query = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(f"http://{self._address}/api/v1/query?{query}", timeout=10) as answer:
                result = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        except OSError:  # not up yet
            return []
        return [(series["metric"], float(series["value"][1])) for series in result]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(WAIT_S)


@pytest.fixture
def prometheus(tmp_path: Path, tiny_launch) -> Iterator[Prometheus]:
    """A Prometheus beside a Ray of this test's own."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    ray = pytest.importorskip("ray")
    from cluster.runtime.ray_backend import RayBackend

    backend = RayBackend(tiny_launch(GenerateConfig(), cluster=CLUSTER))
    backend.connect()
    context = ray.get_runtime_context()
    session = Path(context.get_temp_dir()) / context.get_session_name()
    server = Prometheus(session, tmp_path)
    yield server
    server.close()
    backend.close()


def as_grafana_asks(expression: str) -> str:
    for variable in ("$engine", "$model", "$phase"):
        expression = expression.replace(variable, ".*")
    return expression.replace("$__rate_interval", "15s")


@pytest.mark.ray
@pytest.mark.slow
def test_every_query_returns_data_and_counters_agree_with_the_report(
    prometheus, tiny_launch, half_agreeing_drafter, write_prompts, tmp_path
):
    prompts = write_prompts(*({"prompt": f"def f{index}(values):"} for index in range(9)))
    config = tiny_launch(
        GenerateConfig(prompts=prompts, limit=0, concurrency=3, trace=False),
        drafter=ModelDrafterConfig(path=str(half_agreeing_drafter), num_draft_tokens=3, device="cpu"),
        pipeline=PipelineConfig(PipelineName.branches, adaptive=False),
        cluster=CLUSTER,
        sampling=SamplingConfig(max_tokens=250, ignore_eos=True),
    )
    unanswered, ended = dict(QUERIES), threading.Event()

    def ask_while_it_runs() -> None:
        while unanswered and not ended.wait(0.5):
            for title, expression in list(unanswered.items()):
                series = prometheus.ask(as_grafana_asks(expression))
                if any(math.isfinite(value) for _, value in series):  # a quantile over no request is not a number
                    del unanswered[title]

    asking = threading.Thread(target=ask_while_it_runs)
    asking.start()
    try:
        generate.run(config, tmp_path)
        report = json.loads((tmp_path / "report.json").read_text())
        compare(prometheus, report)
        for name in ("coordinator", "target-0", "draft-0"):
            log = (tmp_path / "logs" / f"{name}.log").read_text()
            assert f" {name} pid=" in log and " ERROR " not in log and "request=3" in log
            assert (prometheus.session / "logs" / CLUSTER.namespace / f"{name}.log").read_text() == log
    finally:
        ended.set()
        asking.join(WAIT_S)
    for title, expression in unanswered.items():
        (series, *_) = re.findall(r"ray_\w+\{.*?\}", as_grafana_asks(expression))
        assert "sum by (" in expression and not prometheus.ask(series), f"{title}: what it counts did happen"


def compare(prometheus: Prometheus, report: dict) -> None:
    """What the last words of the coordinator left behind is what the report says of the same window."""
    expected = {
        "generation_tokens_total": report["tokens"],
        "rounds_total": report["num_rounds"],
        "spec_decode_num_drafts_total": report["num_spec_steps"],
        "spec_decode_num_draft_tokens_total": report["num_draft_tokens"],
        "spec_decode_num_accepted_tokens_total": report["num_accepted_tokens"],
        "request_success_total": report["num_requests"],
        "time_to_first_token_seconds_count": report["num_requests"],
    }
    total = 'sum(ray_specdec_{name}{{phase="{phase}"}})'.format
    plain = total(name="generation_tokens_total", phase="plain")
    deadline = time.monotonic() + WAIT_S
    while prometheus.ask(plain) != [({}, report["plain"]["tokens"])] and time.monotonic() < deadline:
        time.sleep(0.5)  # it comes last
    assert prometheus.ask(plain) == [({}, report["plain"]["tokens"])]
    found = {name: prometheus.ask(total(name=name, phase="speculative")) for name in expected}
    assert found == {name: [({}, value)] for name, value in expected.items()}
    ((_, busy_s),) = prometheus.ask('sum(ray_specdec_busy_seconds_total{phase="speculative", role="target"})')
    ((_, active_s),) = prometheus.ask(total(name="active_seconds_total", phase="speculative"))
    assert busy_s / active_s == pytest.approx(report["target_busy"], rel=1e-6)
    ((_, hits),) = prometheus.ask(total(name="branch_hits_total", phase="speculative"))
    ((_, misses),) = prometheus.ask(total(name="branch_misses_total", phase="speculative"))
    assert hits / (hits + misses) == pytest.approx(report["branch_hit_rate"])
    # Absent is zero: a counter appears with its first event.
    ((_, fallback_s),) = prometheus.ask(total(name="fallback_seconds_total", phase="speculative") + " or vector(0)")
    assert fallback_s == pytest.approx(report["fallback_s"], rel=1e-6, abs=1e-9)
    for mode, count in (("speculate", 1), ("probe", report["num_probes"]), ("trial", report["num_trials"])):
        query = f'sum(ray_specdec_guard_turns_total{{phase="speculative", mode="{mode}"}}) or vector(0)'
        assert prometheus.ask(query) == [({}, count)]
