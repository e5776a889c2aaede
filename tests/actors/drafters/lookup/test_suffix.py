"""Suffix lookup: what is drafted from which source, how much of it, and that the sources follow the text."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from actors.drafters.corpus import read_corpus
from actors.drafters.interface import Context
from actors.drafters.lookup.suffix import MOST_UNREAD, SuffixDrafter, SuffixDrafterConfig
from actors.drafters.lookup.suffix_automaton import suffix_automaton
from actors.protocol.messages import SamplingKind, SamplingParams, TokenTree


def context_of(token_ids, request_id=1, prompt_len=1) -> Context:
    return Context(request_id, 0, list(token_ids), prompt_len, SamplingParams())


def propose(drafter, token_ids, budget=8, request_id=1):
    context = context_of(token_ids, request_id)
    drafter.open(context)
    (draft,) = drafter.propose([context], [budget])
    assert draft.tree.token_ids[0] == token_ids[-1]
    draft.tree.check()
    return draft


def drafted(drafter, token_ids, budget=8, request_id=1):
    return list(propose(drafter, token_ids, budget, request_id).tree.token_ids[1:])


def answer(drafter, token_ids, request_id=50):
    """A request whose answer is all but the first of these tokens, and that ends."""
    context = context_of(token_ids[:1], request_id)
    drafter.open(context)
    context.extend(token_ids[1:])
    drafter.release(request_id)


def make(corpus=(), **config) -> SuffixDrafter:
    return SuffixDrafter(SuffixDrafterConfig(**config), corpus)


def test_what_followed_the_longest_match_is_the_draft():
    assert drafted(make(), [5, 1, 2, 3, 7, 1, 2, 4, 5, 1, 2]) == [3, 7, 1, 2, 4, 5], "two tokens for each of three"


def test_the_longer_the_match_the_longer_the_draft():
    text = list(range(20))
    for matched, length in ((1, 0), (2, 4), (3, 6), (4, 8), (9, 8)):
        assert len(drafted(make(), [*text, 99, *text[:matched]])) == length


def test_it_ends_where_followers_disagree():
    versions = [7, 1, 2, 3, 4, 7, 1, 2, 3, 5, 7, 1, 2, 3, 6, 7, 1, 2]
    assert drafted(make(min_probability=0.5), versions) == [3]
    assert drafted(make(min_probability=0.1), versions)[:2] == [3, 6], "of equals the latest"


def test_what_followed_more_often_is_drafted():
    assert drafted(make(), [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2], budget=1) == [3]


def test_a_repetition_is_read_on_through_the_draft():
    assert drafted(make(), [6, 7, 6, 7, 6, 7], budget=5) == [6, 7, 6, 7, 6]


@pytest.mark.parametrize("token_ids", [[1], [1, 2, 3], [3, 1, 2, 9, 1]])
def test_without_a_match_nothing_is_proposed(token_ids):
    assert drafted(make(), token_ids) == []


def test_a_tree_tries_the_likeliest_followers_first():
    text = [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2]
    draft = propose(make(width=2), text, budget=3)
    assert draft.tree == TokenTree((2, 3, 1, 2), (-1, 0, 1, 2)), "the branch is less likely than the three of the chain"
    wide = propose(make(width=2), text, budget=4).tree
    assert {wide.token_ids[i] for i in wide.children()[0]} == {3, 4}
    assert (
        draft.sampling_kinds == (SamplingKind.ROOT, *[SamplingKind.DETERMINISTIC] * 3)
        and draft.distributions == (None,) * 4
    )


def test_finished_requests_are_drafted_from_and_running_ones_are_not():
    drafter = make()
    first = context_of([9, 9], prompt_len=2)
    drafter.open(first)
    first.extend([1, 2, 3, 4, 5, 6])
    drafter.propose([first], [4])
    assert drafted(drafter, [8, 8, 1, 2], request_id=2) == []
    drafter.release(1)
    assert drafted(drafter, [8, 8, 1, 2], request_id=3) == [3, 4, 5, 6]


def test_requests_share_nothing_if_switched_off():
    drafter = make(shared_tokens=0)
    answer(drafter, [1, 2, 3, 4])
    assert drafted(drafter, [8, 1, 2], request_id=2) == []


def test_shared_text_is_bounded_and_the_oldest_goes_first():
    drafter = make(shared_tokens=200)
    for request in range(40):
        answer(drafter, range(request * 100, request * 100 + 30))
        assert sum(source.num_tokens for source in drafter._histories.of(0).generations) <= 200
    assert drafted(drafter, [7, 3900, 3901], request_id=90) == [3902, 3903, 3904, 3905]
    assert drafted(drafter, [7, 0, 1], request_id=91) == []


def test_answers_are_read_once_something_is_drafted(monkeypatch):
    """Requests come and go while nothing is drafted. The latest of theirs are remembered."""
    drafter, read = make(), list[int]()
    automaton = type(suffix_automaton())
    add_text = automaton.add_text
    monkeypatch.setattr(automaton, "add_text", lambda self, text: read.append(len(text)) or add_text(self, text))
    length, count = 512, 2 + MOST_UNREAD // 512
    for request in range(count):
        answer(drafter, range(request * length, (request + 1) * length), request)
    assert not read, "nothing was drafted"
    last = (count - 1) * length
    assert drafted(drafter, [7, last, last + 1], request_id=90) == [last + 2, last + 3, last + 4, last + 5]
    assert drafted(drafter, [7, 0, 1], request_id=91) == [], "the oldest was not kept"
    assert sum(read) <= MOST_UNREAD < sum(read) + length + 40, "an answer comes with the end of its prompt"


def test_an_answer_longer_than_the_store_leaves_its_end():
    drafter = make(shared_tokens=40)
    answer(drafter, range(100))
    assert drafter._histories.of(0).generations[0].num_tokens == 20
    assert drafted(drafter, [7, 90, 91], request_id=2) == [92, 93, 94, 95]


def test_the_source_with_more_expected_tokens_wins():
    drafter = make(corpus=[[1, 2, 3, 4, 5, 6, 7, 8]])
    assert drafted(drafter, [3, 4, 20, 21, 1, 2, 3, 4]) == [5, 6, 7, 8], "four matched in the corpus, two at home"
    assert drafted(drafter, [3, 4, 20, 21, 7, 3, 4]) == [20, 21, 7, 3], "two here and there: at home"
    assert drafted(make(corpus=[[3, 4, 9]]), [1, 3, 4, 5, 1, 3, 4]) == [5, 1, 3, 4, 5, 1], "at home three, one there"


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(8))
def test_following_token_by_token_equals_starting_anew(seed):
    """Places in shared text and corpus are carried along; a fresh drafter that sees the whole text agrees."""
    choose = random.Random(seed)
    corpus = [[choose.randrange(4) for _ in range(60)]]
    followed, context = make(corpus), context_of([choose.randrange(4)])
    followed.open(context)
    for number in range(12):
        if number == 6:
            other = [choose.randrange(4) for _ in range(30)]
            answer(followed, other)
        context.token_ids += [choose.randrange(4) for _ in range(choose.choice((1, 2, 50)))]
        (draft,) = followed.propose([context], [6])
        fresh = make(corpus)
        if number >= 6:
            answer(fresh, other)
        assert draft == propose(fresh, context.token_ids, 6)


def test_a_request_that_comes_back_is_indexed_anew():
    drafter = make()
    assert drafted(drafter, [1, 2, 3, 1, 2]) != []
    assert drafted(drafter, [4, 5, 6, 1, 2]) == [], "the same id after a preemption, or for another request"


# --- the corpus file --------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_text_file_is_one_document_and_jsonl_has_one_per_line(checkpoint):
    (checkpoint / "corpus.txt").write_text("a b\nc")
    assert read_corpus(checkpoint / "corpus.txt", checkpoint) == [[1, 2, 3]]
    rows = [{"text": "c a"}, {"prompt": "a b ", "text": "c"}, {"prompt": "b"}]
    (checkpoint / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_corpus(checkpoint / "corpus.jsonl", checkpoint) == [[3, 1], [1, 2, 3], [2]]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('{"text": "a"}\n{', "line 2 is not JSON"),
        ('{"text": "a"}\n{"text": "\\ud800"}', "line 2 is not Unicode text"),
        ('{"text": "a"}\n' + "[" * 100_000, "line 2 is nested too deeply"),
        ('{"text": 3}', "line 1: text=3: must be str or null"),
        ('{"turns": []}', "line 1 has neither `prompt` nor `text`"),
        ("3", "line 1: must be object, got int"),
    ],
)
def test_a_line_that_is_no_document_is_named(checkpoint, content, line):
    (checkpoint / "corpus.jsonl").write_text(content)
    with pytest.raises(ValueError, match=line):
        read_corpus(checkpoint / "corpus.jsonl", checkpoint)


def test_a_file_that_is_no_text_is_refused(checkpoint):
    (checkpoint / "corpus.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read_corpus(checkpoint / "corpus.txt", checkpoint)
