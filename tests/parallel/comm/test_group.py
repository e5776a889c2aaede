from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from parallel.comm.group import SINGLE, PeerLost
from parallel.comm.rendezvous import (
    connect_store,
    host_store,
    interface_of,
    join,
    store_in_file,
    store_in_memory,
    store_on_network,
)
from tests.parallel.conftest import in_threads


def collectives(group):
    """One result per operation, each depending on every rank."""
    own = torch.arange(6, dtype=torch.float32).view(2, 3) + 10 * group.rank
    summed = group.all_reduce(own.clone())
    columns = group.all_gather(own)
    rows = group.all_gather(own[:, ::2], dim=0)  # not contiguous
    last = group.broadcast(own.clone(), src=group.size - 1)
    return summed, columns, rows, last


def check_collectives(results):
    size = len(results)
    owns = [torch.arange(6, dtype=torch.float32).view(2, 3) + 10 * rank for rank in range(size)]
    for summed, columns, rows, last in results:
        assert torch.equal(summed, sum(owns))
        assert torch.equal(columns, torch.cat(owns, 1))
        assert torch.equal(rows, torch.cat([own[:, ::2] for own in owns], 0))
        assert torch.equal(last, owns[-1])


def test_a_group_of_one_is_the_identity():
    tensor = torch.ones(2)
    assert SINGLE.all_reduce(tensor) is tensor and SINGLE.all_gather(tensor) is tensor
    assert SINGLE.broadcast(tensor) is tensor
    assert SINGLE.agree((3, 4), "cpu") == [3, 4]
    assert join(None, "alone", 0, 0, 1) is SINGLE


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_between_threads(on_ranks, size):
    check_collectives(on_ranks(size, collectives))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_collectives_of_other_types(on_ranks, dtype):
    for summed in on_ranks(2, lambda group: group.all_reduce(torch.full((3,), group.rank + 1, dtype=dtype))):
        assert summed.tolist() == [3, 3, 3] and summed.dtype == dtype


def test_the_sum_has_the_same_bits_on_every_rank_and_in_every_run(on_ranks):
    torch.manual_seed(0)
    terms = torch.randn(3, 1000)
    runs = [on_ranks(3, lambda group: group.all_reduce(terms[group.rank].clone())) for _ in range(2)]
    for summed in [tensor for run in runs for tensor in run]:
        assert torch.equal(summed, terms[0] + terms[1] + terms[2])


def _process_main(places, results):
    for place in places:
        group = join(connect_store(*place), "processes", 0, 1, 2, timeout_s=60)
        results.put([tensor.tolist() for tensor in collectives(group)])
        group.close()


@pytest.mark.slow
def test_collectives_between_processes(tmp_path):
    """Which meet in a file, then over the network; by default ranks of engines over Ray do."""
    stores = store_in_file(tmp_path), store_on_network("127.0.0.1")
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    other = spawn.Process(target=_process_main, args=([store.place for store in stores], results))
    other.start()
    for store in stores:
        group = join(connect_store(*store.place), "processes", 0, 0, 2, timeout_s=60)
        own = collectives(group)
        check_collectives([own, [torch.tensor(tensor) for tensor in results.get(timeout=60)]])
        group.close()
    other.join(timeout=30)


def test_store_and_group_listen_on_the_chosen_address_only():
    store = host_store()
    groups = []

    def rank_main(rank):
        groups.append(join(connect_store("127.0.0.1", store.port), "tp", 0, rank, 2, timeout_s=20))

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    listening = {one.laddr for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN}
    assert ("127.0.0.1", store.port) in listening and len(listening) >= 3
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
    for group in groups:
        group.close()


def test_the_interface_of_an_address_is_found():
    assert [interface_of("127.0.0.1"), interface_of("192.0.2.77")] == ["lo", ""]


@pytest.mark.parametrize("make", [lambda folder: store_in_memory(), store_in_file], ids=["memory", "file"])
def test_on_one_machine_no_other_user_reaches_the_store(tmp_path, make):
    """A TCPStore answers, stores for and forgets what every process asks that reaches its port: the control."""

    def listening():
        return {one.laddr.port for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN}

    before = listening()
    tmp_path.chmod(0o755)
    store = make(tmp_path)
    connect_store(*store.place).set("key", "value")
    assert listening() == before and connect_store(*store.place).get("key") == b"value"
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in tmp_path.iterdir())
    control = store_on_network("127.0.0.1")
    assert listening() - before == {control.place[1]}


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_cannot_open_the_file_of_a_store():
    with tempfile.TemporaryDirectory(prefix="specdec-test-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        store = store_in_file(Path(folder))
        for command in ('cat "$0"', 'echo >> "$0"', 'rm "$0"'):
            of = ["sh", "-c", command, store.place[0]]
            done = subprocess.run(of, user=65534, group=65534, extra_groups=[], capture_output=True, check=False)
            assert done.returncode and b"ermission denied" in done.stderr
        assert subprocess.run(of, check=False).returncode == 0, "the control: its own user can"


@pytest.mark.parametrize("make", [lambda folder: store_in_memory(), store_in_file], ids=["memory", "file"])
def test_a_store_that_is_gone_is_a_lost_peer(tmp_path, make):
    store = make(tmp_path)
    place = store.place
    del store
    shutil.rmtree(tmp_path)
    with pytest.raises(PeerLost, match=r"^the store in .* is gone$"):
        connect_store(*place)


@pytest.mark.parametrize("make", [lambda folder: store_in_memory(), store_in_file], ids=["memory", "file"])
def test_a_closed_peer_is_an_error_at_once_and_the_next_epoch_works(tmp_path, make):
    """A group that noticed it by its time-out only would wait for longer than a test may take."""
    store = make(tmp_path)
    errors, sums = [], []

    def rank_main(rank):
        own_store = connect_store(*store.place)
        group = join(own_store, "tp", 0, rank, 2, timeout_s=1000)
        if rank == 1:
            group.close()
        try:
            group.all_reduce(torch.ones(1))
        except PeerLost as error:
            errors.append(error)
        group.close()
        group = join(own_store, "tp", 1, rank, 2, timeout_s=20)
        sums.append(group.all_reduce(torch.ones(1)).item())
        group.close()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2 and sums == [2, 2]


class SlowStore(dist.Store):
    """A store whose answers take a while, as those of a busy machine do."""

    def __init__(self, store):
        super().__init__()
        self.store = store

    def set_timeout(self, timeout):
        self.store.set_timeout(timeout)

    def set(self, key, value):
        self.store.set(key, value)

    def wait(self, keys, *timeout):
        self.store.wait(keys, *timeout)

    def get(self, key):
        found = self.store.get(key)
        time.sleep(0.1)
        return found


def test_a_rank_that_leaves_at_once_has_met_every_peer():
    """Which rank connects and which listens is drawn by their ports, so several pairs meet, each with one slow rank."""
    store = host_store()

    def rank_main(number):
        pair, rank = divmod(number, 2)
        own_store = connect_store("127.0.0.1", store.port)
        join(SlowStore(own_store) if rank == pair % 2 else own_store, "tp", pair, rank, 2, timeout_s=20).close()

    in_threads(16, rank_main)


def test_a_rank_that_never_comes_is_named():
    store = host_store()
    with pytest.raises(PeerLost, match=r"group 'tp' of epoch 3: rank 0 could not meet all 2 ranks in 0.2 s"):
        join(connect_store("127.0.0.1", store.port), "tp", 3, 0, 2, timeout_s=0.2)


def test_numbers_that_ranks_agree_on_are_those_of_rank_0_to_the_bit(on_ranks):
    def main(group):
        own = group.rank + 1
        return group.agree([0.1 * own, 1 / own], "cpu"), group.agree((own, 1 << 60), "cpu")

    assert on_ranks(2, main) == [([0.1, 1.0], [1, 1 << 60])] * 2


def test_sends_wait_for_no_receive_and_arrive_in_order(on_ranks):
    def main(group):
        if group.rank == 0:
            sendings = [group.send(torch.full((rows, 3), rows, dtype=torch.bfloat16), 1) for rows in range(1, 6)]
            group.broadcast(torch.zeros(1), src=1)  # the other rank has received them
            return [sending.wait() for sending in sendings]
        found = [group.receive(torch.empty(rows, 3, dtype=torch.bfloat16), 0) for rows in range(1, 6)]
        group.broadcast(torch.zeros(1), src=1)
        return [rows.unique().tolist() for rows in found]

    assert on_ranks(2, main) == [[None] * 5, [[rows] for rows in range(1, 6)]]


@pytest.mark.parametrize("closes", [0, 1])
def test_the_end_of_one_rank_is_an_error_for_what_the_other_sends_or_receives(on_ranks, closes):
    def main(group):
        group.broadcast(torch.zeros(1))
        if group.rank == closes:
            group.close()
        else:
            sendings = []
            with suppress(PeerLost):  # the end may be noticed as early as here
                sendings += (group.send(torch.ones(1000, 300), closes) for _ in range(2))
            with pytest.raises(PeerLost):
                group.receive(torch.empty(7), closes)
            for sending in sendings:
                with pytest.raises(PeerLost):
                    sending.wait()
        with pytest.raises(PeerLost):
            group.send(torch.ones(1), 1 - group.rank).wait()

    on_ranks(2, main)


def test_a_group_of_one_has_no_peer():
    for transfer in (SINGLE.send, SINGLE.receive):
        with pytest.raises(PeerLost):
            transfer(torch.ones(1), 1)
