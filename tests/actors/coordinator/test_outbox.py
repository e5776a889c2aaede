"""What a role knows after each batch, against the texts at the coordinator, over random news and flushes."""

from __future__ import annotations

import random

import pytest

from actors.coordinator.outbox import Outbox
from actors.coordinator.sequence import Sequence
from actors.protocol.messages import Request, SamplingParams, Verdict


class TextAtRole:
    """The role's side: the text of each request, read from batches."""

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}
        self.admissions: set[tuple[int, int, int]] = set()

    def read(self, admits, commits, releases) -> None:
        for request_id in releases:
            del self.texts[request_id]
        for admit in admits:
            assert admit.request_id not in self.texts
            self.texts[admit.request_id] = list(admit.token_ids)
            number = (admit.request_id, admit.epoch, admit.admission)
            assert number not in self.admissions, "an admission has a number of its own"
            self.admissions.add(number)
        for commit in commits:
            assert commit.prefix_len == len(self.texts[commit.request_id])
            self.texts[commit.request_id] += commit.token_ids


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(40))
def test_a_role_that_reads_every_batch_knows_every_text(seed):
    draw, outbox, role = random.Random(seed), Outbox(), TextAtRole()
    sequences = {
        i: Sequence.start(Request(i, tuple(range(1, 2 + draw.randrange(8))), SamplingParams(max_tokens=99)), 200)
        for i in range(4)
    }
    known: set[int] = set()
    sent: dict[int, int] = {}  # tokens sent of texts that are sent in chunks
    for _ in range(60):
        sequence = sequences[draw.randrange(4)]
        request_id = sequence.request_id
        match draw.choice(["admit", "chunk", "extend", "commit", "commit", "release", "flush"]):
            case "admit":
                outbox.admit(sequence)
                known.add(request_id)
                sent.pop(request_id, None)
            case "chunk":
                first = draw.randrange(1, 6)
                outbox.admit(sequence, first)
                known.add(request_id)
                sent[request_id] = first
            case "extend" if request_id in outbox.partial:
                role.read(*outbox.flush())
                count = draw.randrange(1, 6)
                outbox.extend(sequence, count)
                sent[request_id] += count
            case "commit":
                record = sequence.commit(Verdict(request_id, 0, sequence.prefix_len, (), (draw.randrange(9),)), None)
                outbox.add_commit(record)
            case "release":
                outbox.release(request_id)
                known.discard(request_id)
                sent.pop(request_id, None)
            case "flush":
                role.read(*outbox.flush())
                assert not outbox.is_due and outbox.flush() == ((), (), ())
                assert role.texts == {
                    i: sequences[i].token_ids[: sent[i]] if i in outbox.partial else sequences[i].token_ids
                    for i in known
                }
        sent = {i: length for i, length in sent.items() if i in outbox.partial}
        assert outbox.known == known and set(outbox.partial) == set(sent)
        assert all(length < sequences[i].prefix_len for i, length in sent.items())


def test_requests_and_releases_are_due_and_commits_wait_for_an_order():
    outbox, sequence = Outbox(), Sequence.start(Request(1, (3, 4), SamplingParams()), 50)
    outbox.admit(sequence)
    assert outbox.is_due
    outbox.release(1)
    assert not outbox.is_due and outbox.flush() == ((), (), ()), "the role never heard of it"
    outbox.admit(sequence)
    outbox.flush()
    outbox.add_commit(sequence.commit(Verdict(1, 0, 2, (), (5,)), None))
    assert not outbox.is_due
    outbox.release(1)
    assert outbox.is_due and outbox.flush() == ((), (), (1,))
