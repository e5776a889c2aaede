"""One request at its client, record by record: tokens, text, times, why it ended, and what it asks of the engine."""

from __future__ import annotations

import asyncio
import itertools
import random
import struct
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from actors.protocol.logprobs import Logprob, Logprobs
from actors.protocol.messages import Request, RequestStats, SamplingParams, Tokens
from cluster import completion as module
from cluster.completion import Completion, EngineError, Following, Token, TooManyRequestsError, follow
from cluster.io.text import load_tokenizer

STATS = RequestStats(5, 9, 7, (1, 2, 2), 1)


@pytest.fixture
def tokenizer(tiny_checkpoint):
    return load_tokenizer(tiny_checkpoint("Llama"))


@pytest.fixture
def opened(tokenizer, monkeypatch):
    """A completion of one token a character, what it aborts, and a clock that counts its readings from 100 on."""
    clock = itertools.count(100)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))

    def open_(*, logprobs=None, prompt_logprobs=None, **sampling):
        aborted: list[int] = []
        request = Request(7, tuple(tokenizer.encode("ab").ids), SamplingParams(**sampling), drafter="none")
        request = replace(request, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        return Completion(request, "ab", tokenizer, aborted.append), request, aborted

    return open_


def ids(tokenizer, text):
    return tuple(tokenizer.encode(text).ids)


def test_it_begins_with_its_request_and_nothing_else(opened):
    completion, request, aborted = opened(max_tokens=9, stop=("x",))
    assert (completion.request_id, completion.prompt, completion.prompt_token_ids) == (7, "ab", list(request.prompt))
    assert completion.sampling == request.sampling and completion.remaining_request() == request
    assert (completion.token_ids, completion.text, completion.stats) == ([], "", RequestStats())
    assert not completion.finished and not completion.is_aborted and not aborted
    assert (completion.finish_reason, completion.first_token_at, completion.last_token_at) == (None, None, None)
    assert completion.submitted_at == 100


def test_times_are_those_of_the_records_that_brought_tokens(opened, tokenizer):
    completion, request, _ = opened()
    first, second = ids(tokenizer, "cd"), ids(tokenizer, "efg")
    assert not completion.append(Tokens(7, 0, ()))  # at 101
    assert (completion.first_token_at, completion.last_token_at, completion.updated_at) == (None, None, 101)
    assert not completion.append(Tokens(7, 0, first))  # at 102
    assert (completion.first_token_at, completion.last_token_at, completion.updated_at) == (102, 102, 102)
    assert not completion.append(Tokens(7, 0, first))  # at 103: a repetition
    assert (completion.first_token_at, completion.last_token_at, completion.updated_at) == (102, 102, 103)
    assert not completion.append(Tokens(7, 2, second))  # at 104
    assert (completion.first_token_at, completion.last_token_at) == (102, 104)
    assert completion.remaining_request() == replace(request, generated=(*first, *second))  # at 105
    assert completion.updated_at == 105 and completion.finished_at is None
    assert completion.append(Tokens(7, 5, (), "length", STATS))  # at 106
    assert (completion.last_token_at, completion.finished_at, completion.updated_at) == (104, 106, 106)
    assert (completion.finish_reason, completion.stats, completion.text) == ("length", STATS, "cdefg")
    assert completion.result(0) is completion


@pytest.mark.parametrize("seed", range(30))
def test_records_repeated_lost_and_cut_anew_give_each_token_once(opened, tokenizer, seed):
    """Whatever part a record repeats, the tokens are those of the text; a record behind a gap is asked for again."""
    draw = random.Random(seed)
    whole = ids(tokenizer, "the quick brown fox")
    completion, request, _ = opened()
    while len(completion.token_ids) < len(whole):
        known = len(completion.token_ids)
        start = draw.randrange(len(whole))
        record = Tokens(7, start, whole[start : start + draw.randrange(1, 6)])
        assert completion.has_gap(record) is (start > known)
        if start <= known:
            completion.append(record)
            assert len(completion.token_ids) == max(known, start + len(record.token_ids))
        assert tuple(completion.token_ids) == whole[: len(completion.token_ids)]
        assert completion.remaining_request() == replace(request, generated=whole[: len(completion.token_ids)])
    assert completion.text == "the quick brown fox"


def test_a_stop_string_ends_the_text_and_asks_the_engine_to_end_too(opened, tokenizer):
    completion, _, aborted = opened(stop=("XY", "Z"))
    completion.append(Tokens(7, 0, ids(tokenizer, "cX")))
    assert completion.text == "c" and not aborted, "X may begin the stop string"
    completion.append(Tokens(7, 2, ids(tokenizer, "YdeZ")))
    assert (completion.text, aborted, completion.is_aborted) == ("c", [7], True)
    assert len(completion.token_ids) == 3 and not completion.finished
    assert not completion.has_gap(Tokens(7, 9, (1,))), "nothing more is wanted"
    assert completion.append(Tokens(7, 3, (), "abort", STATS))
    assert (completion.finish_reason, completion.stats, completion.text) == ("stop", STATS, "c")
    assert completion.result(0).token_ids == list(ids(tokenizer, "cXY"))


def collect(completion, *, feed=()):
    """Tokens that the iterator gives while a thread appends these records."""

    async def run():
        found: list[Token] = []

        async def read():
            async for token in completion:
                found.append(token)
                assert len(found) <= 9, "each is given once"

        reading = asyncio.create_task(read())
        for record in feed:
            await asyncio.sleep(0)  # the reader waits for more
            await asyncio.to_thread(completion.append, record)
        await asyncio.wait_for(reading, 10)
        return found

    return asyncio.run(run())


def test_an_iterator_gives_every_token_with_the_text_it_adds(opened, tokenizer):
    completion, _, aborted = opened()
    feed = [Tokens(7, 0, ids(tokenizer, "cd")), Tokens(7, 2, ids(tokenizer, "e")), Tokens(7, 3, (), "length")]
    found = collect(completion, feed=feed)
    assert found == [Token(token, "cde"[i], i) for i, token in enumerate(ids(tokenizer, "cde"))]
    assert collect(completion) == found, "from the first on, also after the end"
    assert not aborted


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_text_that_ends_within_a_character_is_whole_for_readers_too(opened, tokenizer, reason):
    """The end may come in a record of its own, after the last token was read."""
    completion, _, _ = opened()
    feed = [Tokens(7, 0, ids(tokenizer, "c😀")[:-1]), Tokens(7, 4, (), reason)]
    found = collect(completion, feed=feed)
    assert "".join(token.text for token in found) == completion.text == "c\N{REPLACEMENT CHARACTER}"
    assert [token.index for token in found] == [0, 1, 2, 3]


def test_pieces_of_several_completions_are_all_of_each(opened, tokenizer):
    completions = [opened(stop=("fg",))[0], opened()[0]]
    texts, counts, reasons = ["", ""], [0, 0], [None, None]

    async def read():
        async for index, piece in follow(completions):
            texts[index] += piece.text
            counts[index] += len(piece.token_ids)
            assert reasons[index] is None
            reasons[index] = piece.finish_reason

    async def run():
        reading = asyncio.create_task(read())
        for index, record in [
            (0, Tokens(7, 0, ids(tokenizer, "cdf"))),
            (1, Tokens(7, 0, ids(tokenizer, "xy"))),
            (0, Tokens(7, 3, ids(tokenizer, "gh"))),
            (1, Tokens(7, 2, ids(tokenizer, "é")[:1], "length")),
            (0, Tokens(7, 5, (), "abort")),
        ]:
            await asyncio.sleep(0)
            await asyncio.to_thread(completions[index].append, record)
        await asyncio.wait_for(reading, 10)

    asyncio.run(run())
    assert texts == [completion.text for completion in completions] == ["cd", "xy\N{REPLACEMENT CHARACTER}"]
    assert (counts, reasons) == ([4, 3], ["stop", "length"])


def test_the_last_token_carries_what_a_stop_string_held_back(opened, tokenizer):
    completion, _, aborted = opened(stop=("XYZ",))
    feed = [Tokens(7, 0, ids(tokenizer, "cXY")), Tokens(7, 3, (), "length")]
    found = collect(completion, feed=feed)
    assert "".join(token.text for token in found) == completion.text == "cXY"
    assert [token.text for token in found] == ["", "", "cXY"] and not aborted


def test_with_stop_strings_a_token_waits_for_its_successor(opened, tokenizer):
    """The last token may still get text, so what an iterator gave never changes."""

    async def first(completion, count):
        iterator = aiter(completion)
        found = [await asyncio.wait_for(anext(iterator), 5) for _ in range(count)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(iterator), 0.01)
        return found

    for stop, num_given in (((), 2), (("XY",), 1)):
        completion, _, aborted = opened(stop=stop)
        completion.append(Tokens(7, 0, ids(tokenizer, "cd")))
        assert len(asyncio.run(first(completion, num_given))) == num_given
        assert aborted == [7], "leaving early aborts the request"


def test_a_round_wakes_an_event_loop_once(opened, tokenizer, monkeypatch):
    """However many requests it brings tokens for, and however many are followed."""

    async def rounds():
        loop, completions, calls = asyncio.get_running_loop(), [opened()[0] for _ in range(6)], []
        call = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: calls.append(args) or call(*args))
        followed = [follow(completions[:2]), *[follow([one]) for one in completions[2:]]]
        for number, text in enumerate("cde"):
            waiting = [asyncio.ensure_future(anext(one)) for one in followed]
            await asyncio.sleep(0)
            for completion in completions:
                completion.append(Tokens(7, number, ids(tokenizer, text)))
            found = [(await one)[1].text for one in waiting] + [(await anext(followed[0]))[1].text]
            assert (found, len(calls)) == ([text] * 6, number + 1)
        for one in followed:
            await one.aclose()

    asyncio.run(rounds())


def test_what_is_wanted_whole_wakes_its_loop_at_its_begin_and_end(opened, tokenizer, monkeypatch):
    async def rounds():
        loop, calls, found = asyncio.get_running_loop(), [], []
        call = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: calls.append(args) or call(*args))
        completion, *_ = opened()
        following = Following([completion], of_parts=False)
        for number, text in enumerate("cdefg"):
            completion.append(Tokens(7, number, ids(tokenizer, text), "length" if text == "g" else None))
            if text in "cg":
                found.append([piece.text for _, piece in await following.gained()])
            else:
                await asyncio.sleep(0.01)
        assert (found, len(calls), await following.gained()) == ([["c"], ["defg"]], 2, [])

    asyncio.run(rounds())


def test_what_is_not_followed_may_come_later_once_it_has_begun(opened, tokenizer):
    async def waits(completion, *, of_parts):
        following = Following([completion], of_parts=of_parts)
        before = completion.may_wait
        following.leave()
        return before, completion.may_wait

    completion, _, _ = opened()
    assert not completion.may_wait, "when it begins is a time that is measured"
    completion.append(Tokens(7, 0, ids(tokenizer, "c")))
    assert completion.may_wait
    assert asyncio.run(waits(completion, of_parts=True)) == (False, True)
    assert asyncio.run(waits(completion, of_parts=False)) == (True, True)
    ends_itself, _, _ = opened(stop=("x",))
    ends_itself.append(Tokens(7, 0, ids(tokenizer, "c")))
    assert not ends_itself.may_wait, "its text may end it"


def test_a_loop_that_was_closed_is_forgotten(opened, tokenizer):
    async def leave_one():
        completion.add_waiter(asyncio.Event())

    completion, _, _ = opened()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave_one())
    loop.close()
    for number in range(3):
        completion.append(Tokens(7, number, ids(tokenizer, "c")))
    ((waker, *_),) = completion._waiters
    assert not waker._due and completion.token_ids == list(ids(tokenizer, "ccc"))


def test_leaving_after_the_end_aborts_nothing(opened, tokenizer):
    async def one(completion):
        return await anext(aiter(completion))

    completion, _, aborted = opened()
    completion.append(Tokens(7, 0, ids(tokenizer, "cd"), "length"))
    assert asyncio.run(one(completion)).text == "c" and not aborted


@pytest.mark.parametrize(
    ("reason", "error", "raised"),
    [("error", "lost", EngineError), ("refused", "busy", TooManyRequestsError), ("abort", None, None)],
)
def test_why_it_ended_decides_what_its_readers_get(opened, reason, error, raised):
    completion, _, _ = opened()
    completion.append(Tokens(7, 0, (5,), reason, STATS, error))
    assert (completion.finish_reason, completion.stats) == (reason, STATS)
    if raised is None:
        assert completion.result(0).token_ids == [5] and [token.id for token in collect(completion)] == [5]
        return
    for read in (lambda: completion.result(0), lambda: collect(completion)):
        with pytest.raises(EngineError, match=f"^{error}$") as caught:
            read()
        assert type(caught.value) is raised


def test_a_failure_ends_it_once_and_keeps_an_earlier_end(opened, tokenizer):
    completion, _, _ = opened(stop=("XY",))
    completion.append(Tokens(7, 0, ids(tokenizer, "cX")))
    completion.fail("gone")
    assert (completion.finish_reason, completion.text, completion.finished_at) == ("error", "cX", 102)
    completion.fail("gone again")
    with pytest.raises(EngineError, match="^gone$"):
        completion.result(0)
    ended, _, _ = opened()
    ended.append(Tokens(7, 0, (5,), "length"))
    at = ended.finished_at
    ended.fail("too late")
    assert (ended.result(0).finish_reason, ended.finished_at) == ("length", at)


def test_a_result_waits_for_the_end_alone(opened):
    completion, _, aborted = opened()
    with pytest.raises(TimeoutError, match="^request 7 is still running$"):
        completion.result(0.01)
    assert not aborted, "waiting no longer asks for nothing"
    found = []
    waiting = threading.Thread(target=lambda: found.append(completion.result()))
    waiting.start()
    completion.append(Tokens(7, 0, (5,)))
    assert waiting.is_alive()
    completion.append(Tokens(7, 1, (6,), "length"))
    waiting.join(10)
    assert found == [completion]


def test_abort_asks_and_does_not_end(opened):
    completion, _, aborted = opened()
    completion.abort()
    assert aborted == [7] and completion.is_aborted and not completion.finished
    assert completion.append(Tokens(7, 0, (), "abort", None)) and completion.stats == RequestStats()


def said_of(token_ids):
    """Log-probabilities of each token, and of token 9 beside it; values and ranks are by the token."""
    cells = [cell for token in token_ids for cell in ((token, -token / 4), (9, -0.5))]
    ids_, values = zip(*cells, strict=True)
    return Logprobs(
        1,
        struct.pack(f"<{len(ids_)}i", *ids_),
        struct.pack(f"<{len(ids_)}f", *values),
        struct.pack(f"<{len(token_ids)}i", *[1 + token for token in token_ids]),
    )


def entries_of(token_ids):
    return [{token: Logprob(-token / 4, 1 + token), 9: Logprob(-0.5, 1)} for token in token_ids]


def test_log_probabilities_follow_the_tokens_through_repetitions_and_up_to_a_stop(opened, tokenizer):
    completion, request, aborted = opened(logprobs=1, prompt_logprobs=1, stop=("fg",))
    assert (completion.logprobs, completion.prompt_logprobs) == ([], None)
    text, prompt = ids(tokenizer, "cdefgh"), request.prompt
    of_prompt = said_of(prompt[1:])
    completion.append(Tokens(7, 0, text[:2], logprobs=said_of(text[:2]), prompt_logprobs=of_prompt))
    completion.append(Tokens(7, 0, text[:3], logprobs=said_of(text[:3]), prompt_logprobs=of_prompt))
    assert completion.prompt_logprobs == [None, *entries_of(prompt[1:])]
    assert completion.logprobs == entries_of(text[:3])
    (piece, num_tokens, num_texts) = completion.piece_since(0, 0)
    assert piece.logprobs == tuple(entries_of(text[:3]))
    completion.append(Tokens(7, 3, text[3:], logprobs=said_of(text[3:])))
    assert aborted and completion.token_ids == [*text[:5]] and completion.logprobs == entries_of(text[:5])
    assert completion.piece_since(num_tokens, num_texts)[0].logprobs == tuple(entries_of(text[3:5]))
    remaining = completion.remaining_request()
    assert (remaining.logprobs, remaining.prompt_logprobs) == (1, 1)


def test_a_prompt_of_one_token_has_nothing_before_it(opened, tokenizer):
    completion, *_ = opened(prompt_logprobs=1)
    completion.append(Tokens(7, 0, ids(tokenizer, "c"), prompt_logprobs=Logprobs(1)))
    assert completion.prompt_logprobs == [None] and completion.logprobs is None
    assert completion.piece_since(0, 0)[0].logprobs == ()
