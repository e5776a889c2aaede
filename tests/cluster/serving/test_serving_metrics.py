"""`/metrics`: the coordinator's counters and the times of the server's requests, in the form that Prometheus reads."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from cluster.observability.metrics import COUNTERS, ENGINE_LABELS, GAUGES, HISTOGRAMS, PREFIX, RANK_GAUGES
from tests.cluster.serving.conftest import RunningServer, serving, until


def scrape(server: RunningServer) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by name, and by the labels beside those of the engine."""
    status, headers, text = server.ask("/metrics")
    assert status == 200 and headers.get_content_type() == "text/plain"
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for sample in [sample for family in text_string_to_metric_families(text) for sample in family.samples]:
        assert [sample.labels[name] for name in ENGINE_LABELS] == ["specdec", "tiny-chat", "model", "sync"]
        own = tuple(value for name, value in sample.labels.items() if name not in ENGINE_LABELS)
        assert own not in found.setdefault(sample.name.removeprefix(PREFIX), {})
        found[sample.name.removeprefix(PREFIX)][own] = sample.value
    return found


def test_every_metric_is_there(server: RunningServer):
    server.ask("/v1/completions", {"prompt": "a", "max_tokens": 4})
    _, _, text = server.ask("/metrics")
    names = {family.name.removeprefix(PREFIX) for family in text_string_to_metric_families(text)}
    totals = {counted.name.removesuffix("_total") for counted in COUNTERS} | {"request_success"}
    times = {name for name, *_ in HISTOGRAMS} - {"request_queue_time_seconds"}
    assert names == totals | times | {*GAUGES} | {*RANK_GAUGES}


def test_the_numbers_are_those_of_the_engine_and_grow_with_requests(server: RunningServer):
    body = {"prompt": "abc", "max_tokens": 20, "seed": 1, "ignore_eos": True}
    server.ask("/v1/completions", body)
    before, counted = scrape(server), server.engine.report(spans=False)
    assert not counted.spans and server.engine.report().spans
    assert before["generation_tokens_total"][()] == counted.counters["num_tokens"]
    assert before["spec_decode_num_accepted_tokens_total"][()] == counted.counters["num_accepted_tokens"]
    _, _, reply = server.ask("/v1/completions", {**body, "n": 2})
    assert server.ask("/v1/completions", {**body, "stream": True})[0] == 200
    ended = before["request_success_total"][("length",)] + 3  # a stream ends behind its last chunk
    until(lambda: scrape(server)["request_success_total"][("length",)] == ended)
    after = scrape(server)
    assert reply["usage"]["completion_tokens"] == 40
    assert after["generation_tokens_total"][()] == before["generation_tokens_total"][()] + 60
    assert after["prompt_tokens_total"][()] == before["prompt_tokens_total"][()] + 9
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_time_per_output_token_seconds"):
        assert after[f"{name}_count"][()] == before[f"{name}_count"][()] + 3
        assert after[f"{name}_sum"][()] > before[f"{name}_sum"][()]
    assert (after["num_requests_running"][()], after["num_requests_waiting"][()]) == (0, 0)
    assert after["weight_bytes"][("0", "target")] > 0


def test_the_names_of_vllm_have_the_same_values(chat_checkpoint, half_agreeing_drafter):
    with serving(chat_checkpoint, half_agreeing_drafter, metrics_alias="vllm") as server:
        server.ask("/v1/completions", {"prompt": "abc", "max_tokens": 9, "ignore_eos": True})
        _, _, text = server.ask("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    aliases = [name for name in families if name.startswith("vllm:")]
    assert {"vllm:num_requests_running", "vllm:spec_decode_num_drafts", "vllm:e2e_request_latency_seconds"} <= {
        *aliases
    }
    assert len(aliases) == 16
    for name in aliases:
        own = families[name.replace("vllm:", PREFIX)]
        assert families[name].type == own.type and own.samples
        values = [(sample.labels, sample.value) for sample in families[name].samples]
        assert values == [(sample.labels, sample.value) for sample in own.samples]
