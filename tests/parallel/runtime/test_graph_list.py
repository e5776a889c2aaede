from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from parallel.model.families.registry import read_config
from parallel.runtime.graph_list import bucket, describe, graph_bytes, graph_shapes


@given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 4096))
def test_the_list_has_a_bucket_for_every_pass(sequences, rows, limit):
    shapes = graph_shapes(sequences, rows, limit)
    for batch in {1, sequences // 2 or 1, sequences}:
        for per_sequence in {1, rows}:
            if batch * per_sequence <= limit and bucket(batch) * bucket(per_sequence) <= bucket(limit):
                assert (bucket(batch), bucket(per_sequence)) in shapes
    assert len(shapes) == len(set(shapes)) <= 64
    sizes = [batch * per_sequence for batch, per_sequence in shapes]
    assert sizes == sorted(sizes, reverse=True), "smaller passes fit into the memory of larger ones"
    assert max(sizes, default=0) <= bucket(limit)


def test_graphs_take_more_memory_the_more_there_are_and_the_larger(llama):
    config = read_config(llama.path)
    small, large = graph_shapes(4, 1, 2048), graph_shapes(64, 8, 2048)
    assert graph_bytes(config, 2, []) == 0 < graph_bytes(config, 2, small) < graph_bytes(config, 2, large)
    wide = replace(config, intermediate_size=8 * config.intermediate_size)
    assert graph_bytes(wide, 2, small) > graph_bytes(config, 2, small)
    assert describe(small) == "4x1 2x1 1x1"
