"""The datastore against searches by brute force, and what is refused."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from actors.drafters.interface import Context
from actors.drafters.retrieval import datastore
from actors.drafters.retrieval.config import DEPTH, RestDrafterConfig
from actors.drafters.retrieval.datastore import SEPARATOR, Datastore, suffix_array, write_datastore
from actors.drafters.retrieval.rest import RestDrafter, frequent_tree
from actors.protocol.messages import SamplingParams
from parallel.whole_files import WriteError
from tests.damage import damaged_bytes, damaged_json, tried
from tests.full_disk import full_disk


def random_documents(choose, alphabet):
    return [[choose.choice(alphabet) for _ in range(choose.randint(1, 60))] for _ in range(choose.randint(1, 8))]


def occurrences(documents, wanted):
    """What follows each occurrence within its document."""
    size = len(wanted)
    return [
        tuple(document[i + size :])
        for document in documents
        for i in range(len(document) - size + 1)
        if document[i : i + size] == wanted
    ]


def open_store(tmp_path, documents):
    write_datastore(tmp_path / "store", documents, "digest")
    return Datastore(tmp_path / "store")


def paths(tree):
    return {tuple(tree.token_ids[i] for i in tree.path_to(node)) for node in range(1, len(tree.token_ids))}


@pytest.mark.parametrize("seed", range(12))
def test_matches_and_continuations_are_those_of_a_search(tmp_path, seed):
    """Tokens beyond 65535 too, which the released file of 16 bits a token confuses."""
    choose = random.Random(seed)
    alphabet = choose.choice([(0, 1), (7, 65543, 2**31, 300), (65536, 0)])
    documents = random_documents(choose, alphabet)
    store = open_store(tmp_path, documents)
    for _ in range(40):
        text = [choose.choice(alphabet) for _ in range(choose.randint(1, 9))]
        shortest, longest = choose.choice([(1, 4), (2, 8)])
        matched, low, high = store.longest_match(text, shortest, longest)
        lengths = [
            size for size in range(shortest, min(longest, len(text)) + 1) if occurrences(documents, text[-size:])
        ]
        assert matched == max(lengths, default=0)
        if not matched:
            continue
        found = store.continuations(matched, low, high, 5, 10_000)
        after = occurrences(documents, text[-matched:])
        expected = sorted([*one[:5], *[SEPARATOR] * (5 - len(one))] for one in after)
        assert found.tolist() == expected
        tree = frequent_tree(text[-1], found, budget := choose.randint(1, 12))
        tree.check()
        counts = Counter(one[:length] for one in after for length in range(1, min(5, len(one)) + 1))
        assert sorted(counts[path] for path in paths(tree)) == sorted(counts.values())[-min(budget, len(counts)) :]


def test_no_continuation_crosses_documents(tmp_path):
    """The released code joins documents without a separator."""
    after = [
        store.continuations(1, *store.matches([2]), 3, 9).tolist()
        for store in (open_store(tmp_path, [[1, 2], [3, 4, 5]]), open_store(tmp_path, [[1, 2, 3, 4, 5]]))
    ]
    assert after == [[[SEPARATOR] * 3], [[3, 4, 5]]]


def test_suffixes_are_sorted_by_their_first_tokens():
    choose = random.Random(0)
    for _ in range(5):
        tokens = [choose.randrange(2) for _ in range(200)] + [1] * 100
        order = suffix_array(np.array(tokens, ">u4")).tolist()
        assert sorted(order) == list(range(300))
        beginnings = [tokens[start : start + DEPTH] for start in order]
        assert beginnings == sorted(beginnings)


def test_many_matches_are_thinned_evenly(tmp_path):
    store = open_store(tmp_path, [[1, token] for token in range(100)])
    found = store.continuations(1, *store.matches([1]), 1, 10)
    assert found[:, 0].tolist() == sorted(found[:, 0]) and 5 <= len(found) <= 10 and found.max() > 80


def test_the_drafter_keeps_its_budget_and_may_find_nothing(tmp_path):
    store = open_store(tmp_path, [[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 4]])
    drafter = RestDrafter(RestDrafterConfig(datastore="store"), store)

    def draft(text, budget):
        return drafter.propose([Context(1, 0, text, 1, SamplingParams())], [budget])[0].tree

    assert paths(draft([1, 5, 6], 9)) == {(7,), (7, 8), (7, 9), (4,)}
    assert paths(draft([1, 5, 6], 1)) == {(7,)}
    assert draft([1, 2, 6], 9).num_draft_tokens == draft([6], 9).num_draft_tokens == 0


def test_a_file_that_is_none_is_refused(tmp_path, monkeypatch):
    write_datastore(tmp_path / "store", [[1, 2]], "digest")
    (tmp_path / "text").write_text("no store")
    (tmp_path / "cut").write_bytes((tmp_path / "store").read_bytes()[:-1])
    for name, line in (("text", "is no datastore"), ("cut", "is damaged")):
        with pytest.raises(ValueError, match=line):
            Datastore(tmp_path / name)
    monkeypatch.setattr(datastore, "_MOST_TOKENS", 2)
    for documents in ([[1, 2]], []):
        with pytest.raises(ValueError, match=r"job.files: hold \d tokens"):
            write_datastore(tmp_path / "more", documents, "digest")
    assert not (tmp_path / "more").exists()


NUM_DAMAGES = 300
VOCAB_SIZE = 40
BEYOND = (-(2**31), -5000, -1, 0, 1, 200, 2**20, 2**31 - 1)


def with_numbers(content, rng):
    """A datastore with some numbers of tokens or array replaced by others, in and out of range."""
    numbers = np.frombuffer(content[4096:], np.int32).copy()
    numbers[rng.sample(range(len(numbers)), rng.randint(1, 4))] = rng.choice(BEYOND)
    return content[:4096] + numbers.tobytes()


def with_header(content, rng):
    """A datastore with a damaged header of the right length."""
    kind, header = damaged_json(content[:4096].decode(), rng)
    return kind, header[:4096].ljust(4096) + content[4096:]


def opened(path):
    store = Datastore(path)
    store.check_tokens(VOCAB_SIZE)
    return store


def test_damaged_files_are_one_line_or_drafts_of_the_vocabulary(tmp_path):
    rng, path = random.Random(0), tmp_path / "store"
    documents = [[rng.randrange(VOCAB_SIZE) for _ in range(20)] for _ in range(5)]
    write_datastore(path, documents, "digest")
    good, num_refused = path.read_bytes(), 0
    for i in range(NUM_DAMAGES):
        kind, content = [damaged_bytes, with_header, lambda *args: ("numbers", with_numbers(*args))][i % 3](good, rng)
        path.write_bytes(content)
        store, refusal = tried(lambda: opened(path))
        num_refused += store is None
        assert store or refusal.startswith(str(path)), kind
        if store is not None:
            drafter = RestDrafter(RestDrafterConfig(datastore="store", shortest_match=1), store)
            texts = [Context(1, 0, list(document[:7]), 1, SamplingParams()) for document in documents]
            for draft in drafter.propose(texts, [9] * len(texts)):
                draft.tree.check()
                assert max(draft.tree.token_ids) < VOCAB_SIZE, kind
    assert NUM_DAMAGES / 3 < num_refused < NUM_DAMAGES


@pytest.mark.parametrize("entry", [-(2**31), -1, 106, 2**31 - 1])
def test_an_array_beyond_the_tokens_is_refused(tmp_path, entry):
    write_datastore(tmp_path / "store", [[1] * 105], "digest")
    content = bytearray((tmp_path / "store").read_bytes())
    content[-4:] = np.int32(entry).tobytes()
    (tmp_path / "store").write_bytes(content)
    with pytest.raises(ValueError, match="is damaged, it names tokens beyond its 106; make it again"):
        Datastore(tmp_path / "store")


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path):
    store = open_store(tmp_path, [[1, 2, 40]])
    store.check_tokens(41)
    with pytest.raises(ValueError, match="holds tokens beyond the target's 40; make it again"):
        store.check_tokens(40)


def test_a_full_disk_leaves_the_old_datastore(tmp_path):
    path = tmp_path / "store"
    write_datastore(path, [[1, 2]], "digest")
    with full_disk(8192), pytest.raises(WriteError, match=rf"^{path}: cannot be written"):
        write_datastore(path, [[3] * 1000], "digest")
    assert Datastore(path).about["num_tokens"] == 3 and [*tmp_path.iterdir()] == [path]
