from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.kv.rounded_rows import rounded_rows
from parallel.model.families.registry import read_config
from parallel.runtime.cuda_graphs import MOST_GRAPHS
from parallel.runtime.graph_list import (
    LAYER_BYTES,
    GraphList,
    bucket,
    chain_lengths,
    chain_shapes,
    example_rows,
    graph_bytes,
    graph_shapes,
)


@given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 4096))
def test_the_list_has_a_shape_for_every_pass(sequences, rows, limit):
    shapes = graph_shapes(sequences, rows, limit)
    for batch in {1, sequences // 2 or 1, sequences}:
        for most in {1, rows}:
            for total in {batch + most - 1, batch * most}:
                if total <= limit and bucket(batch) * bucket(most) <= bucket(limit):
                    assert (bucket(batch), bucket(most), rounded_rows(total)) in shapes
    assert len(shapes) == len(set(shapes)) <= MOST_GRAPHS
    sizes = [total for _, _, total in shapes]
    assert sizes == sorted(sizes, reverse=True), "smaller passes fit into the memory of larger ones"
    for shape in shapes:
        numbers = example_rows(shape)
        found = bucket(len(numbers)), bucket(max(numbers)), rounded_rows(sum(numbers))
        assert min(numbers) >= 1 and found == shape
    assert max(sizes, default=0) <= bucket(limit)


def test_many_rows_are_rounded_up_by_half_at_most_and_few_to_powers_of_two():
    found = {rounded_rows(size) for size in range(1, 600)}
    assert sorted(found) == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768]
    assert all(size <= rounded_rows(size) < 1.5 * size for size in range(129, 5000))


def test_graphs_take_the_memory_of_their_largest_pass_and_of_the_results_of_each(llama):
    """Counted by hand: 6 rows of hidden states and 3 of the MLP in the largest pass, 4 rows of results and every
    layer's bookkeeping for each graph, logits twice, and those of a chain in float32."""
    config = replace(read_config(llama.path), hidden_size=10, intermediate_size=20, num_layers=2, vocab_size=50)
    graphs = GraphList([(4, 1, 4), (2, 1, 2)], [(3, 5)])
    activations, results, logits = 4 * (60 + 60), (4 + 2) * 4 * 10, 2 * 4 * 50
    expected = 2 * (activations + results + logits) + 4 * 3 * 50 + (2 + 5) * 2 * LAYER_BYTES
    assert graph_bytes(config, 2, graphs) == expected


def test_graphs_take_more_memory_the_more_there_are_and_the_larger(llama):
    config = read_config(llama.path)
    small, large = GraphList(graph_shapes(4, 1, 2048)), GraphList(graph_shapes(64, 8, 2048))
    assert graph_bytes(config, 2, GraphList()) == 0 < graph_bytes(config, 2, small) < graph_bytes(config, 2, large)
    wide = replace(config, intermediate_size=8 * config.intermediate_size)
    assert graph_bytes(wide, 2, small) > graph_bytes(config, 2, small)
    chains = replace(small, chains=chain_shapes(3, 5), of_every_row=False)
    assert graph_bytes(config, 2, chains) > graph_bytes(config, 2, small)
    assert str(chains) == "4x1 2x1 1x1 " + " ".join(f"{n}x1*{steps}" for n in (4, 2, 1) for steps in (5, 4, 2, 1))
    assert chains.largest_head() == 4 and large.largest_head() == 512 and chain_shapes(3, 0) == []
    assert str(small) == "4x1 2x1 1x1"
    assert str(GraphList(graph_shapes(4, 4, 8))) == "2x4 4x2 1x4 2x2 2x4/4 4x1 4x2/4 1x2 2x1 1x1"


def test_the_bytes_of_graphs_are_those_of_the_sum(llama):
    """Two passes of 8 and 16 rows, kept with and without the logits of every row, and a chain of 3 steps for 4."""
    config = read_config(llama.path)
    hidden, inner, vocab, layers = config.hidden_size, config.intermediate_size, config.num_logits, config.num_layers
    graphs = GraphList([(4, 4, 16), (4, 2, 8)], [(4, 3)], of_every_row=True, of_last_rows=True)
    activations, results = 16 * (6 * hidden + 3 * inner), 2 * (16 + 8) * 4 * hidden
    logits, scores = 2 * 16 * vocab, 4 * 4 * vocab
    expected = (activations + results + logits) * 2 + scores + (2 * 2 + 3) * layers * (256 << 10)
    assert graph_bytes(config, 2, graphs) == expected
    last = GraphList([(4, 4, 16), (4, 2, 8)], of_every_row=False, of_last_rows=True)
    results, logits = (16 + 8) * 4 * hidden, 2 * 4 * vocab
    assert graph_bytes(config, 4, last) == (activations + results + logits) * 4 + 2 * layers * (256 << 10)
    assert graph_bytes(config, 2, GraphList()) == 0


@pytest.mark.parametrize(
    ("most", "lengths"),
    [(0, []), (-1, []), (1, [1]), (2, [2, 1]), (4, [4, 2, 1]), (5, [5, 4, 2, 1]), (8, [8, 4, 2, 1])],
)
def test_chains_are_of_the_most_steps_and_powers_of_two_below(most, lengths):
    assert chain_lengths(most) == lengths
    assert chain_shapes(3, most) == [(batch, steps) for batch in (4, 2, 1) for steps in lengths]


def test_a_list_is_written_by_its_shapes():
    graphs = GraphList([(64, 8, 512), (64, 8, 256), (1, 1, 1)], [(4, 7)])
    assert str(graphs) == "64x8 64x8/256 1x1 4x1*7"
    assert graphs.largest_head() == 512
    assert GraphList([(64, 8, 512)], [(80, 7)], of_every_row=False).largest_head() == 80
    assert GraphList([(64, 8, 512)], of_every_row=False).largest_head() == 64 and GraphList().largest_head() == 0


@pytest.mark.parametrize("size", range(1, 18))
def test_a_bucket_is_the_least_power_of_two_that_holds_a_size(size):
    assert bucket(size) == min(1 << exponent for exponent in range(6) if 1 << exponent >= size)


def test_a_pass_of_every_shape_has_its_sequences_and_rows():
    for batch, rows, total in graph_shapes(8, 8, 32):
        numbers = example_rows((batch, rows, total))
        assert (bucket(len(numbers)), bucket(max(numbers)), bucket(sum(numbers))) == (batch, rows, total)
        assert min(numbers) >= 1
