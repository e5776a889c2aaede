"""Engines whose drafter is lent by a pool: the same tokens as without one, whatever happens to the pool."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.config import Placement
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.drafters.pool.config import PoolDrafterConfig
from actors.options import PipelineConfig, PipelineName, SamplingConfig, VerifyConfig, VerifyRule
from actors.protocol.leases import LeaseAnswer, LeaseOrder, LeaseTerms
from actors.transport.channel import Link
from actors.transport.keys import LinkKey
from cluster.config.jobs import PoolConfig
from cluster.config.schema import ClusterConfig, ClusterName, LaunchConfig
from cluster.draft_pool import DraftPool, check_lendable
from cluster.engine import Engine

COUPLED = VerifyConfig(VerifyRule.coupled)
PROMPTS = ["def f(", "import os\n", "class A:\n    def", "for i in range("]


@dataclass
class RunningPool:
    pool: DraftPool
    thread: threading.Thread
    cancelled: threading.Event

    def end(self) -> None:
        self.cancelled.set()
        self.thread.join()
        self.pool.close()


@pytest.fixture
def open_pool(
    tiny_launch: Callable[..., LaunchConfig],
    half_agreeing_drafter: Path,
    tmp_path: Path,
    one_free_thread: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., RunningPool]]:
    """Pools in this process, ended with the test. Engines order leases more often than usual, and so sooner again."""
    pools: list[RunningPool] = []
    monkeypatch.setattr("cluster.runtime.pool_leases.RENEW_S", 0.25)

    def open_(
        listen: str = "tcp://127.0.0.1:*",
        pipeline: str = "branches",
        lookup: Any = None,
        model: Path = half_agreeing_drafter,
        **job: Any,
    ) -> RunningPool:
        secret_file = str(tmp_path / "secret")
        drafter: Any = ModelDrafterConfig(path=str(model), num_draft_tokens=4, device="cpu")
        if lookup:
            drafter = AutoDrafterConfig(drafters=[lookup, drafter], num_draft_tokens=4, placement=Placement.separate)
        config = tiny_launch(
            PoolConfig(listen=listen, secret_file=secret_file, **job),
            drafter=drafter,
            verify=COUPLED,
            pipeline=PipelineConfig(PipelineName(pipeline), adaptive=False),
        )
        pool, cancelled = DraftPool(config, tmp_path), threading.Event()
        thread = threading.Thread(target=pool.serve, args=(cancelled.is_set,), daemon=True)
        thread.start()
        pools.append(RunningPool(pool, thread, cancelled))
        return pools[-1]

    yield open_
    for running in pools:
        if running.thread.is_alive():
            running.end()


def lent(*pools: RunningPool, num_draft_tokens: int = 4) -> PoolDrafterConfig:
    places = [running.pool.address for running in pools]
    files = [str(running.pool.key_file) for running in pools]
    return PoolDrafterConfig(pools=places, key_files=files, num_draft_tokens=num_draft_tokens)


def sections(pipeline: str = "branches", temperature: float = 0.0, max_tokens: int = 60) -> dict[str, object]:
    sampling = SamplingConfig(max_tokens=max_tokens, temperature=temperature, seed=3, ignore_eos=True)
    return {"verify": COUPLED, "pipeline": PipelineConfig(PipelineName(pipeline), adaptive=False), "sampling": sampling}


def texts(engine: Engine, prompts: list[str] = PROMPTS) -> list[tuple[int, ...]]:
    return [tuple(completion.token_ids) for completion in engine.generate(prompts)]


def in_parallel(engines: list[Engine]) -> list[list[tuple[int, ...]]]:
    found: dict[int, list[tuple[int, ...]]] = {}
    threads = [
        threading.Thread(target=lambda i=i, one=one: found.update({i: texts(one)})) for i, one in enumerate(engines)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[i] for i in range(len(engines))]


def accepted(engine: Engine) -> int:
    """Draft tokens that the target accepts for all prompts."""
    return sum(completion.stats.num_accepted_tokens for completion in engine.generate(PROMPTS))


def eventually(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def plain_texts(open_engine, plain_of: dict[Any, list[tuple[int, ...]]]) -> Callable[..., list[tuple[int, ...]]]:
    """The texts without a drafter, each made once."""

    def of(**options: Any) -> list[tuple[int, ...]]:
        key = tuple(sorted(options.items()))
        if key not in plain_of:
            plain_of[key] = texts(open_engine("none", **sections("plain", **options)))
        return plain_of[key]

    return of


@pytest.fixture(scope="module")
def plain_of() -> dict[Any, list[tuple[int, ...]]]:
    return {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "temperature"),
    [("sync", 0.0), ("branches", 1.0), ("sync", 1.0), ("branches", 0.0), ("tree", 0.0), ("tree", 1.0)],
)
def test_three_engines_share_one_drafter(open_engine, plain_texts, open_pool, pipeline, temperature):
    """By default two do (below, and where the metrics are read)."""
    plain = plain_texts(temperature=temperature)
    pool = open_pool(pipeline=pipeline)
    engines = [open_engine(lent(pool), **sections(pipeline, temperature)) for _ in range(3)]
    assert in_parallel(engines) == [plain] * 3
    for engine in engines:
        eventually(lambda engine=engine: accepted(engine) > 0)  # a busy machine may have lost a lease
    assert pool.pool.num_leases == 3
    for engine in engines:
        engine.close()
    eventually(lambda: pool.pool.num_leases == 0)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["sync", "branches"])
def test_engines_share_several_drafters(open_engine, plain_texts, open_pool, pipeline):
    """By default two share one (below), and passes of several are merged without engines
    (`tests/actors/pool/test_merged_passes.py`)."""
    plain = plain_texts()
    pool = open_pool(pipeline=pipeline, lookup=NgramDrafterConfig())
    engines = [open_engine(lent(pool), **sections(pipeline)) for _ in range(2)]
    assert in_parallel(engines) == [plain] * 2
    eventually(lambda: all(accepted(engine) > 0 for engine in engines))
    assert texts(engines[0]) == plain
    passes = pool.pool._passes
    assert passes.drafter.capabilities.drafts_by_pass is not None and passes.counts.num_proposals > 0


@pytest.mark.extended
def test_an_engine_that_waits_for_no_draft_shares_the_pool_with_one_that_does(open_engine, plain_texts, open_pool):
    """A far drafter that a pool lends: previews stream, and a lookup beside the coordinator drafts where none fits.

    A preview fits that comes before the next pass begins, so passes take their time; how long is waited for one that
    does is a number of texts.
    """
    plain = plain_texts(max_tokens=70)
    pool, sectioned = open_pool(pipeline="tree"), sections("tree", max_tokens=70)
    pipeline = PipelineConfig(PipelineName.tree, adaptive=False, local_drafter="ngram")
    far = open_engine(lent(pool), pace_ms=10, **(sectioned | {"pipeline": pipeline}))
    near = open_engine(lent(pool), **sectioned)

    def both_draft() -> bool:
        assert in_parallel([far, near]) == [plain] * 2
        by_source = far.report().counters["drafts_by_source"]
        return len(by_source) == 2 and by_source["far"]["num_accepted_tokens"] > 0 and accepted(near) > 0

    assert any(both_draft() for _ in range(20)), far.report().counters["drafts_by_source"]
    assert not any(tenant.has_failed for tenant in _tenants(pool.pool._service))
    assert in_parallel_with(pool.end, far) == plain
    lookups = open_pool(pipeline="tree", lookup=NgramDrafterConfig())
    with pytest.raises(ValueError, match=r"the pool shows no drafts ahead; drop pipeline\.local_drafter"):
        open_engine(lent(lookups), **(sectioned | {"pipeline": pipeline}))


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = [line for line in page.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


@pytest.mark.extended
def test_metrics_count_what_each_engine_was_given(open_engine, open_pool, tmp_path, monkeypatch):
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr("actors.pool.service.WATCH_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"job.metrics_port={port}: cannot listen on 127.0.0.1"):
            open_pool(metrics_port=port)
    pool = open_pool(pipeline="sync", metrics_port=port)
    engines = [open_engine(lent(pool), **sections("sync", max_tokens=30)) for _ in range(2)]
    for engine in engines:
        eventually(lambda engine=engine: accepted(engine) > 0)
    eventually(lambda: in_parallel(engines) is not None and scrape(port)["specdec_pool_running_leases"] == 2)

    def of(name: str, engine: Engine) -> float:
        address = engine._backend.address
        return max(value for key, value in scrape(port).items() if key.startswith(name) and address in key)

    for engine in engines:
        eventually(lambda engine=engine: of("specdec_lease_accepted_tokens_total", engine) > 0)
        assert of("specdec_lease_passes_total", engine) > 0
    eventually(lambda: in_parallel(engines) is not None and of("specdec_lease_merged_passes_total", engines[0]) > 0)
    engines[0].close()
    eventually(lambda: of("specdec_lease_rows", engines[0]) == 0)
    pool.end()
    with pytest.raises(OSError, match="refused"):
        scrape(port)
    check_report(tmp_path, engines[1])


@pytest.mark.slow
def test_a_pool_that_is_gone_costs_speed_alone_and_one_that_is_back_drafts_again(open_engine, plain_texts, open_pool):
    """By default one of two is gone, and the only one is gone (where an engine waits for no draft) or late."""
    plain = plain_texts(max_tokens=400)
    pool = open_pool()
    engine = open_engine(lent(pool), **sections(max_tokens=400))
    assert in_parallel_with(pool.end, engine) == plain
    assert texts(engine) == plain  # without any pool
    again = open_pool(listen=pool.pool.address)
    eventually(lambda: again.pool.num_leases == 1)
    eventually(lambda: accepted(engine) > 0)
    assert texts(engine) == plain


@pytest.mark.extended
def test_a_pool_that_is_started_again_with_another_model_drafts_with_that_one(
    open_engine, plain_texts, open_pool, tiny_checkpoint
):
    """Texts that run meanwhile stay as they are. The second model is the target itself, so none of its draft tokens is
    rejected, as some of the first one's are: it uses nothing that the first one has read or prepared."""
    plain, pool = plain_texts(max_tokens=400), open_pool()
    engine = open_engine(lent(pool), **sections(max_tokens=400))

    def accepted_share() -> float:
        stats = [completion.stats for completion in engine.generate(PROMPTS)]
        num_drafted = sum(one.num_draft_tokens for one in stats)
        return sum(one.num_accepted_tokens for one in stats) / num_drafted if num_drafted else 0.0

    eventually(lambda: 0 < accepted_share() < 0.9)
    again = list[RunningPool]()

    def exchange() -> None:
        pool.end()
        again.append(open_pool(listen=pool.pool.address, model=tiny_checkpoint("Llama")))

    assert in_parallel_with(exchange, engine) == plain
    eventually(lambda: accepted_share() > 0.99)
    assert again[0].pool.num_leases == 1
    assert texts(engine) == plain


@pytest.mark.slow
def test_the_next_pool_takes_over(open_engine, plain_texts, open_pool, monkeypatch):
    monkeypatch.setattr("cluster.runtime.pool_leases.FASTER_S", 5.0)  # of equal pools, on a busy machine too
    first, second = open_pool(), open_pool()
    engine = open_engine(lent(first, second), **sections())
    assert (first.pool.num_leases, second.pool.num_leases) == (1, 0)
    plain = plain_texts()
    first.end()
    eventually(lambda: second.pool.num_leases == 1)
    eventually(lambda: accepted(engine) > 0)
    assert texts(engine) == plain


@pytest.mark.slow
def test_the_pool_whose_drafts_come_soonest_lends_first(open_engine, plain_texts, open_pool):
    """By default the order is checked without pools (`runtime/test_pool_leases.py`)."""
    slow, full, fast = open_pool(), open_pool(max_leases=1), open_pool()
    slow.pool._service._shared.draft_s.update(5.0)
    other = open_engine(lent(full), **sections())
    engine = open_engine(lent(slow, full, fast), **sections())
    assert [pool.pool.num_leases for pool in (slow, full, fast)] == [0, 1, 1]
    plain = plain_texts()
    assert texts(engine) == texts(other) == plain
    assert fast.pool._service._shared.draft_s.weight > 0
    fast.end()
    eventually(lambda: slow.pool.num_leases == 1)  # the one that was lost is asked last
    eventually(lambda: accepted(engine) > 0)


@pytest.mark.extended
def test_two_pools_draft_at_a_time_and_one_that_is_gone_costs_speed_alone(open_engine, plain_texts, open_pool):
    plain = plain_texts(max_tokens=70)
    pools = [open_pool(), open_pool()]
    engine = open_engine(replace(lent(*pools), at_once=2), **sections(max_tokens=70))
    eventually(lambda: {"draft-0", "draft@1-0"} <= {*engine.ready})
    assert not {"draft-0", "draft@1-0"} & set(engine.pids())

    def all_draft(*pools: RunningPool) -> bool:
        before = [num_drafts(pool) for pool in pools]
        assert texts(engine) == plain
        return all(num_drafts(pool) > count for pool, count in zip(pools, before, strict=True))

    eventually(lambda: all_draft(*pools))
    assert in_parallel_with(pools[1].end, engine) == plain
    eventually(lambda: all_draft(pools[0]))
    again = open_pool(listen=pools[1].pool.address)
    eventually(lambda: all_draft(pools[0], again))
    eventually(lambda: [pool.pool.num_leases for pool in (pools[0], again)] == [1, 1])
    pools[0].end()
    eventually(lambda: all_draft(again))


def num_drafts(pool: RunningPool) -> int:
    return sum(tenant.counts.num_drafts for tenant in _tenants(pool.pool._service))


@pytest.mark.extended
def test_an_engine_starts_before_its_pool(open_engine, plain_texts, open_pool, monkeypatch):
    monkeypatch.setattr("cluster.runtime.pool_leases._LEASE_S", 1.0)
    pool = open_pool()
    pool.end()
    engine = open_engine(lent(pool), **sections())
    assert texts(engine) == plain_texts()
    open_pool(listen=pool.pool.address)
    eventually(lambda: accepted(engine) > 0)


@pytest.mark.slow
def test_requests_beyond_the_share_of_kv_rows_decode_plainly(open_engine, plain_texts, open_pool, monkeypatch):
    """By default shares are bounded without an engine (`tests/actors/pool/test_shares.py`)."""
    plain = plain_texts()
    monkeypatch.setattr("actors.pool.tenant_drafter.ROWS_BESIDE_TEXT", 20)
    pool = open_pool()
    pool.pool._service._shared.kv_slots = 2 * 110  # a share holds one text of at most 90 tokens
    engines = [open_engine(lent(pool), **sections()) for _ in range(2)]
    assert in_parallel(engines) == [plain] * 2

    def only_some_have_drafts() -> bool:
        speculated = [completion.stats.num_spec_steps for completion in engines[0].generate(PROMPTS)]
        return speculated[0] > 0 and 0 in speculated

    eventually(only_some_have_drafts)  # on a busy machine a lease may be lost, and ordered again


@pytest.mark.slow
def test_texts_that_are_read_in_parts_are_drafted_for_as_others(open_engine, plain_texts, open_pool, tmp_path):
    """By default a drafter reads them without an engine (`tests/actors/pool/test_tenant_drafter.py`)."""
    plain = plain_texts()
    found: set[int] = set()
    for read_chunk in (512, 3):
        pool = open_pool(pipeline="sync")
        pool.pool._service._shared.read_chunk = read_chunk
        engine = open_engine(lent(pool), **sections("sync"))
        eventually(lambda engine=engine: accepted(engine) > 0)
        if not found:
            found |= {accepted(engine) for _ in range(2)}  # a busy machine may have lost a lease meanwhile
        else:
            eventually(lambda engine=engine, found=found: accepted(engine) in found)
        assert texts(engine) == plain
        pool.end()
        check_report(tmp_path, engine)
        engine.close()


def check_report(run_dir: Path, engine: Engine) -> None:
    """What the pool has written of its last lease, which was this engine's."""
    report = json.loads((run_dir / "leases.json").read_text())
    lease = report["leases"][-1]
    assert lease["engine"] == engine._backend.address and lease["why"]
    counts = lease["counts"]
    assert counts["num_draft_tokens"] > counts["num_accepted_tokens"] > 0
    assert report["merged"]["num_orders"] > 0 and report["share"] > 0


@pytest.mark.slow
def test_requests_that_make_passes_fail_end_the_lease_of_their_engine_alone(
    open_engine, plain_texts, open_pool, monkeypatch
):
    """By default passes fail without engines (`tests/actors/pool/test_merged_passes.py`)."""
    plain = plain_texts()
    pool = open_pool(pipeline="sync", lease_s=5)
    good, bad = [open_engine(lent(pool), **sections("sync", max_tokens=length)) for length in (60, 61)]
    for engine in (good, bad):
        eventually(lambda engine=engine: accepted(engine) > 0)
    service, drafter = pool.pool._service, pool.pool._passes.drafter
    propose, of_good = drafter.propose, next(one for one in _tenants(service) if _is_of(one, good))

    def fails(contexts: list[Any], budgets: list[int]) -> Any:
        if any(context.sampling.max_tokens == 61 for context in contexts):
            raise RuntimeError("a bad pass")
        return propose(contexts, budgets)

    monkeypatch.setattr(drafter, "propose", fails)
    found = in_parallel([good, bad])
    assert found[0] == plain and [text[:60] for text in found[1]] == plain
    eventually(lambda: not any(one.is_running for one in _tenants(service) if _is_of(one, bad)))
    (failed,) = [one for one in _tenants(service) if _is_of(one, bad)]
    assert failed.has_failed and "a bad pass" in failed.why
    assert accepted(good) > 0
    assert of_good.is_running and of_good in _tenants(service)
    monkeypatch.undo()
    eventually(lambda: accepted(bad) > 0)


def _tenants(service: Any) -> list[Any]:
    return [*service._tenants.values()]


def _is_of(tenant: Any, engine: Engine) -> bool:
    return tenant.order.hub_address == engine._backend.address


def test_a_pool_that_drafts_for_other_engines_is_refused_at_the_start(open_engine, open_pool, monkeypatch):
    pool = open_pool(pipeline="tree")
    with pytest.raises(ValueError, match=r"drafter.pools=tcp.*: the pool drafts for pipeline=tree, not branches"):
        open_engine(lent(pool), **sections("branches"))
    with pytest.raises(ValueError, match="num_draft_tokens=9: the pool drafts 4 at most"):
        open_engine(lent(pool, num_draft_tokens=9), **sections("tree"))
    monkeypatch.setattr("cluster.draft_pool.tokenizer_digest", lambda _: "of another model")
    with pytest.raises(ValueError, match=r"the pool's vocabulary is not the target's; start the pool with target"):
        open_engine(lent(open_pool(pipeline="tree")), **sections("tree"))


@pytest.mark.extended
def test_a_delayed_line_delays_the_records_of_a_pool(open_engine, open_pool):
    pool = open_pool()
    engine = open_engine(lent(pool), cluster=ClusterConfig(ClusterName.inprocess, link_delay_ms=1), **sections())
    (tenant,) = _tenants(pool.pool._service)
    assert tenant.order.hub_address == engine._backend.hub_address("draft") != engine._backend.address
    eventually(lambda: accepted(engine) > 0)  # a lease is granted before its rank serves


@pytest.mark.slow
def test_a_lease_ends_without_its_engine(open_pool):
    pool = open_pool(lease_s=2, max_leases=1)
    with ordering(pool) as ask:
        assert not ask(1).why
        assert pool.pool.num_leases == 1
        eventually(lambda: pool.pool.num_leases == 0)
        assert "was silent" in ask(1).why
        assert not ask(2).why  # another lease of the same engine
        assert "lease 2 has replaced it" in ask(1).why
        with ordering(pool, private=b"p" * 32) as other:
            assert "all 1 leases are taken" in other(1).why
        assert pool.pool.num_leases == 1


def test_no_engine_waits_for_the_end_of_a_lease(open_pool):
    pool = open_pool()
    tenants = pool.pool._service._shared.tenants
    with ordering(pool) as ask, ordering(pool, b"p" * 32) as other:
        assert not ask(1).why and not other(1).why
        eventually(lambda: len(tenants) == 2)
        kept, replaced = tenants
        with pool.pool._passes.turn():  # as a pass that takes long, after which its rows can be given back
            assert not other(2).why and not ask(1).why
            assert "has not ended yet" in other(3).why
            assert tenants == [kept, replaced] and pool.pool.num_leases == 2
        eventually(lambda: len(tenants) == 2 and replaced not in tenants)
        assert kept in tenants


@pytest.mark.extended
def test_a_pool_goes_on_where_its_report_cannot_be_written(open_pool, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("actors.pool.service.WATCH_S", 0.1)
    pool = open_pool()
    report = tmp_path / "leases.json"
    with ordering(pool) as ask:
        assert not ask(1).why
        eventually(report.exists)
        report.unlink()
        report.mkdir()  # in its place, as a disk that is full
        eventually(lambda: "leases.json: cannot be written" in caplog.text)
        time.sleep(0.5)
        assert not ask(1).why and pool.pool.num_leases == 1
        assert caplog.text.count("leases.json: cannot be written") == 1
        report.rmdir()
        eventually(report.exists)


def test_the_engines_with_one_key_have_so_many_leases(open_pool):
    pool = open_pool(max_leases=3, leases_per_key=1)
    alice = pool.pool.clients.add("alice")
    eventually(lambda: "alice" in pool.pool._service._clients)  # the file is read about once a second
    with ordering(pool) as first, ordering(pool, b"p" * 32) as second, ordering(pool, b"q" * 32, alice) as hers:
        assert not first(1).why
        assert second(1).why == "all 1 leases of the key default are taken (job.leases_per_key)"
        assert not hers(1).why and not first(1).why
        assert not first(2).why  # in place of its own
        assert pool.pool.num_leases == 2


@pytest.mark.slow
def test_a_key_that_is_taken_away_ends_its_leases_alone(open_engine, plain_texts, open_pool, caplog):
    plain = plain_texts(max_tokens=400)
    pool = open_pool()
    key = pool.pool.clients.add("alice")
    of_alice = PoolDrafterConfig("pool", [pool.pool.address], [str(key)], 4)
    text = key.read_text()
    alice, other = open_engine(of_alice, **sections(max_tokens=400)), open_engine(lent(pool), **sections())
    for engine in (alice, other):
        eventually(lambda engine=engine: accepted(engine) > 0)
    assert {tenant.client for tenant in _tenants(pool.pool._service)} == {"alice", "default"}
    assert in_parallel_with(lambda: pool.pool.clients.remove("alice"), alice) == plain
    eventually(lambda: pool.pool.num_leases == 1)
    eventually(lambda: f"{pool.pool.address}: the pool does not admit this key alice; it was taken away" in caplog.text)
    assert texts(alice) == plain and accepted(other) > 0
    pool.pool.clients.add("alice")  # another key of that name
    pool.end()
    again = open_pool(listen=pool.pool.address)
    eventually(lambda: accepted(other) > 0)
    assert list(again.pool.clients.read()) == ["default", "alice"] and again.pool.num_leases == 1
    key.write_text(text)
    with ordering(again, key_file=key) as ask, pytest.raises(AssertionError, match="no answer"):
        ask(1)


@pytest.mark.extended
def test_a_file_of_keys_that_cannot_be_read_changes_nothing(open_pool, caplog, monkeypatch):
    monkeypatch.setattr("actors.pool.service._READ_S", 0.1)
    pool = open_pool()
    with ordering(pool) as ask:
        assert not ask(1).why
        file = pool.pool.key_file.with_name("clients")
        file.write_text("nonsense")
        eventually(lambda: "clients: cannot be read" in caplog.text)
        time.sleep(0.5)
        assert not ask(1).why and pool.pool.num_leases == 1
    assert caplog.text.count("clients: cannot be read") == 1


def test_a_pool_that_was_started_again_renews_no_lease_of_the_one_before(open_pool):
    """Its rank would have the number of a process that the coordinator knows to be in a later epoch, and waits for."""
    pool = open_pool()
    with ordering(pool) as ask:
        assert ask(1, is_renewal=True).why.startswith("it knows nothing of lease 1") and not pool.pool.num_leases
        assert not ask(2).why and not ask(2, is_renewal=True).why and pool.pool.num_leases == 1


@contextmanager
def ordering(
    pool: RunningPool, private: bytes = b"o" * 32, key_file: Path | None = None
) -> Iterator[Callable[..., LeaseAnswer]]:
    """Orders a lease by its number, or renews it, for an engine that does not exist."""
    terms = LeaseTerms("coupled", "branches")
    order = LeaseOrder(1, "tcp://127.0.0.1:9", b"h" * 32, terms, 100, 100, 4, private)
    key = LinkKey.read((key_file or pool.pool.key_file).read_text())
    link = Link(pool.pool.address, f"{key.peer}:{private.hex()[:8]}", key)

    def ask(number: int, *, is_renewal: bool = False) -> LeaseAnswer:
        link.send(replace(order, number=number, is_renewal=is_renewal))
        while (answer := link.receive(5)) is not None:
            if answer.number == number:
                return answer
        raise AssertionError("no answer")

    yield ask
    link.close()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"drafter": PoolDrafterConfig("pool", ["tcp://h:1"], ["k"])}, "drafts nothing here"),
        ({"pipeline": PipelineConfig(PipelineName.plain)}, "drafts nothing here"),
        ({"verify": VerifyConfig(VerifyRule.block)}, "verify=block: a pool's drafts are verified by verify=coupled"),
    ],
)
def test_what_cannot_be_lent_is_refused(tiny_launch, changes, why):
    config = tiny_launch(
        PoolConfig(), **({"verify": COUPLED, "pipeline": PipelineConfig(PipelineName.branches)} | changes)
    )
    with pytest.raises(ValueError, match=why):
        check_lendable(config)


@pytest.mark.extended
def test_a_key_of_another_pool_opens_nothing(open_engine, open_pool, tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.runtime.pool_leases._LEASE_S", 1.0)
    pool = open_pool()
    (tmp_path / "wrong").write_text(LinkKey.made_for("default", b"h" * 32).text)
    engine = open_engine(PoolDrafterConfig("pool", [pool.pool.address], [str(tmp_path / "wrong")]), **sections())
    assert pool.pool.num_leases == 0
    assert accepted(engine) == 0
    (tmp_path / "no key").write_text("nothing")
    with pytest.raises(ValueError, match="holds no key of a pool"):
        open_engine(PoolDrafterConfig("pool", [pool.pool.address], [str(tmp_path / "no key")]), **sections())


def in_parallel_with(act: Callable[[], object], engine: Engine) -> list[tuple[int, ...]]:
    """The texts, while which `act` is called: when each has begun."""
    running = [engine.submit(prompt) for prompt in PROMPTS]
    while not all(completion.token_ids for completion in running):
        time.sleep(0.001)
    act()
    return [tuple(completion.result().token_ids) for completion in running]


@contextmanager
def pool_process(half_agreeing_drafter: Path, target: str, folder: Path, listen: str) -> Iterator[tuple[int, str]]:
    """Process id and address of `job=pool`."""
    overrides = [
        "job=pool",
        "cluster=inprocess",
        f"job.listen={listen}",
        f"job.secret_file={folder / 'secret'}",
        f"hydra.run.dir={folder / 'run'}",
        f"target.path={target}",
        f"drafter.path={half_agreeing_drafter}",
        "target.device=cpu",
        *("drafter=model", "drafter.device=cpu", "drafter.num_draft_tokens=4", "pipeline=branches", "verify=coupled"),
    ]
    command = [sys.executable, "-P", "-m", "cluster.launch", *overrides]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("lending "))
        yield process.pid, line.split(" at ")[1].split(",")[0]
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGCONT)
            process.terminate()
            assert process.wait(60) == 0
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_pool_that_freezes_and_one_that_is_killed(
    open_engine, plain_texts, half_agreeing_drafter, tmp_path, tiny_checkpoint
):
    """A process of its own: frozen, it drafts again once the engine has another lease; killed and started again at its
    address, with its secret, likewise."""
    of_pool = half_agreeing_drafter, str(tiny_checkpoint("Llama")), tmp_path
    plain = plain_texts(max_tokens=400)
    with pool_process(*of_pool, "tcp://127.0.0.1:*") as (pid, address):
        lease = PoolDrafterConfig("pool", [address], [str(tmp_path / "secret.keys" / "secret")], 4)
        engine = open_engine(lease, **sections(max_tokens=400))
        assert accepted(engine) > 0
        assert in_parallel_with(lambda: os.kill(pid, signal.SIGSTOP), engine) == plain
        assert texts(engine) == plain
        os.kill(pid, signal.SIGCONT)
        eventually(lambda: accepted(engine) > 0)
        assert texts(engine) == plain
        assert in_parallel_with(lambda: os.kill(pid, signal.SIGKILL), engine) == plain
    assert texts(engine) == plain
    with pool_process(*of_pool, address):
        eventually(lambda: accepted(engine) > 0)
        assert texts(engine) == plain


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_of_two_pools_is_killed(
    open_engine, plain_texts, open_pool, half_agreeing_drafter, tmp_path, tiny_checkpoint
):
    plain = plain_texts(max_tokens=400)
    pool = open_pool()
    with pool_process(half_agreeing_drafter, str(tiny_checkpoint("Llama")), tmp_path, "tcp://127.0.0.1:*") as (pid, at):
        lease = replace(lent(pool), pools=[at, pool.pool.address], at_once=2)
        engine = open_engine(lease, **sections(max_tokens=400))
        eventually(lambda: {"draft-0", "draft@1-0"} <= {*engine.ready})
        assert in_parallel_with(lambda: os.kill(pid, signal.SIGKILL), engine) == plain
    assert texts(engine) == plain
    eventually(lambda: accepted(engine) > 0)
