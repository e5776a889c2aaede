"""Masks of a draft's nodes: those of a matcher that reads nothing but the path to the node."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace

import pytest
import torch
from tokenizers import Tokenizer

from actors.grammars import trial
from actors.grammars.compiler import GrammarCompiler, TooBusyError
from actors.grammars.compiler import _source as source
from actors.grammars.masks import GrammarMasks
from actors.protocol.grammar import MOST_GRAMMAR_CHARACTERS, Grammar
from actors.protocol.messages import MOST_FORCED, TokenTree
from cluster.pocket import TARGET

SCHEMA = Grammar("json_schema", '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}')
VOCAB_SIZE = 4096 + 24  # more than the tokenizer has, as in padded models
EOS = 0


@dataclass
class Text:
    """As a pass has it."""

    token_ids: list[int]
    tree: TokenTree
    seq_id: int = 7
    prompt_len: int = 2


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler((TARGET / "tokenizer.json").read_text, (EOS,))


@pytest.fixture(scope="module")
def allowed_after(compiler):
    """Tokens that a fresh matcher allows after a text; None if it does not accept the text."""

    def allowed(grammar, token_ids):
        matcher = compiler.matcher(grammar)
        if token_ids and not matcher.consume_tokens(list(token_ids)):
            return None
        bits = matcher.compute_bitmask()
        return {token for token in range(8 * len(bits)) if bits[token // 8] >> token % 8 & 1}

    return allowed


def written(compiler, allowed_after, choose, grammar, count):
    """Random tokens that follow the grammar."""
    text = []
    while len(text) < count:
        choices = sorted(allowed_after(grammar, text) - {EOS})
        if not choices:
            break
        text.append(choose.choice(choices))
    return text


def random_tree(choose, root, num_nodes, next_tokens):
    """Nodes in the order of a search by breadth, by depth or neither; some of their tokens break the grammar."""
    tokens, parents, paths = [root], [-1], [[]]
    for _ in range(num_nodes):
        parent = choose.randrange(len(tokens))
        allowed = next_tokens(paths[parent])
        token = choose.choice(sorted(allowed)) if allowed and choose.random() < 0.8 else choose.randrange(4096)
        if any(parents[i] == parent and tokens[i] == token for i in range(1, len(tokens))):
            continue
        tokens.append(token)
        parents.append(parent)
        paths.append([*paths[parent], token])
    return TokenTree(tuple(tokens), tuple(parents)), paths


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(8))
def test_a_node_has_the_mask_of_its_path(compiler, allowed_after, seed):
    """Round after round of one request: the text grows, and drafts are taken back. A node that no path reaches, because
    the grammar rejects it or one above it, keeps its logits."""
    choose = random.Random(seed)
    masks, prompt = GrammarMasks(compiler), [5, 6]
    masks.open(7, SCHEMA)
    whole = written(compiler, allowed_after, choose, SCHEMA, 12)
    num_rejected = 0
    for end in sorted(choose.sample(range(len(whole) + 1), min(4, len(whole)))):
        text = whole[:end]

        def next_tokens(path, text=text):
            return allowed_after(SCHEMA, [*text, *path])

        root = [*prompt, *text][-1]
        tree, paths = random_tree(choose, root, choose.randrange(10), next_tokens)
        logits = torch.zeros(len(paths), VOCAB_SIZE)
        found = masks.masked([Text([*prompt, *text], tree)], logits)
        assert logits.eq(0).all(), "the logits themselves stay for other readers"
        for row, path in zip(found, paths, strict=True):
            allowed = next_tokens(path)
            expected = set(range(VOCAB_SIZE)) if allowed is None else allowed
            num_rejected += allowed is None
            assert set(row.isfinite().nonzero()[:, 0].tolist()) == expected
    assert num_rejected or seed, "no node was rejected"


def test_at_the_end_only_the_end_token_is_allowed_and_requests_without_a_grammar_keep_their_logits(compiler):
    masks, grammar = GrammarMasks(compiler), Grammar("regex", "yes")
    masks.open(7, grammar)
    text = [int(token) for token in compiler.matcher(grammar).compute_ff_tokens()]
    other = Text([5, 6, 9], TokenTree.chain(9, [4, 3]), seq_id=8)
    logits = torch.randn(4, VOCAB_SIZE)
    found = masks.masked([other, Text([5, 6, *text], TokenTree.root(text[-1]))], logits)
    assert found[:3].equal(logits[:3]) and found[3].isfinite().nonzero()[:, 0].tolist() == [EOS]
    assert found[3, EOS] == logits[3, EOS]
    assert masks.masked([other], logits[:3]) is not logits and masks.masked([other], logits).data_ptr()
    masks.close(7)
    assert masks.masked([Text([5, 6, *text], TokenTree.root(text[-1]))], logits) is logits


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar("regex", "(("), []),
        (Grammar("json_schema", '{"type": "foo"}'), []),
        (Grammar("regex", "yes"), [500]),
        (Grammar("lark", "start: missing"), []),
    ],
)
def test_a_grammar_that_failed_allows_nothing(compiler, grammar, text):
    """Also one whose text it does not accept, which a client claimed was generated."""
    masks = GrammarMasks(compiler)
    masks.open(7, grammar)
    for _ in range(2):
        found = masks.masked([Text([5, 6, *text], TokenTree.chain(3, [4, 5]))], torch.zeros(3, VOCAB_SIZE))
        assert not found.isfinite().any()


@pytest.mark.parametrize(
    ("grammar", "line"),
    [
        (Grammar("regex", "(("), r"^grammar: this regex cannot be used \(.*unclosed group.*\)$"),
        (Grammar("json_schema", "[1"), r"^grammar: is no json_schema \(.*\)$"),
        (Grammar("json_schema", '{"not": {}}'), r"^grammar: this json_schema cannot be used \(.*not.*\)$"),
        (Grammar("json_schema", "[" * 60_000), r"^grammar: is no json_schema \("),
        (Grammar("lark", "begin: 'a'"), r"^grammar: this lark cannot be used \(.*\)$"),
        (Grammar("gbnf", "x"), r"^grammar.kind: 'gbnf' is none of json_schema, regex, lark$"),
        (Grammar("regex", ""), r"^grammar.text: has 0 characters; give 1 to 65536$"),
        (Grammar("regex", "a" * (MOST_GRAMMAR_CHARACTERS + 1)), r"^grammar.text: has 65537 characters"),
    ],
)
def test_what_is_no_grammar_is_said_in_one_line(compiler, grammar, line):
    with pytest.raises(ValueError, match=line):
        compiler.matcher(grammar)


def test_a_target_without_an_end_token_has_no_grammars():
    with pytest.raises(ValueError, match="the target has no end token"):
        GrammarCompiler((TARGET / "tokenizer.json").read_text, ()).matcher(SCHEMA)
    with pytest.raises(ValueError, match="the target's tokenizer does not allow any"):
        GrammarCompiler(lambda: "{}", (1,)).matcher(SCHEMA)


def test_forced_tokens_are_the_only_text_that_may_follow(compiler):
    tokenizer, masks = Tokenizer.from_file(str(TARGET / "tokenizer.json")), GrammarMasks(compiler)
    masks.open(7, Grammar("regex", "(yes|no), because of the weather(.|!)?"))

    def ids(text):
        return tokenizer.encode(text).ids

    text = Text([5, 6], TokenTree.root(6))
    assert masks.forced(text, ()) == () and masks.forced(replace(text, seq_id=8), ids("yes")) == ()
    assert tokenizer.decode(masks.forced(text, ids("yes"))).startswith(", because of the weather"[:20])
    assert masks.forced(text, ids("maybe")) == (), "no text of the grammar"
    grown = replace(text, token_ids=[5, 6, *ids("no")])
    assert tokenizer.decode(masks.forced(grown, ids(", bec"))).startswith("ause of the")
    assert masks.forced(grown, ids(", because of the weather")) == ()
    masks.close(7)
    masks.open(7, Grammar("regex", "a{500}"))
    assert 0 < len(masks.forced(text, ids("a"))) <= MOST_FORCED


def test_a_grammar_is_compiled_once(compiler, monkeypatch):
    compiled = []
    monkeypatch.setattr("actors.grammars.compiler._source", lambda grammar: compiled.append(grammar) or source(grammar))
    fresh = GrammarCompiler((TARGET / "tokenizer.json").read_text, (EOS,))
    first, second = fresh.matcher(SCHEMA), fresh.start(SCHEMA).result()
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be used"):
            fresh.matcher(Grammar("regex", "(?=a)b"))
    assert len(compiled) == 2, "nor is one that was refused"
    assert first.consume_tokens(first.compute_ff_tokens() or [91]) and second.compute_bitmask() != b""
    assert second.try_consume_tokens([91]) == 1, "matchers are copies: none has read what another has"


def test_a_machine_without_time_for_a_trial_refuses_nothing_for_good(monkeypatch):
    fresh = GrammarCompiler((TARGET / "tokenizer.json").read_text, (EOS,))
    grammar = Grammar("json_schema", '{"type": "string", "pattern": "^[a-z]{3}$"}')
    monkeypatch.setattr(trial, "_WALL_S", 0.0)
    with pytest.raises(TooBusyError, match="too busy to compile it"):
        fresh.matcher(grammar)
    monkeypatch.setattr(trial, "_WALL_S", 300.0)
    assert fresh.matcher(grammar).compute_bitmask()


def test_a_known_grammar_does_not_wait_for_others(monkeypatch):
    """Clients mostly send the same schemas again; one that sends new ones without end is not to hold these up."""
    fresh, goes_on = GrammarCompiler((TARGET / "tokenizer.json").read_text, (EOS,)), threading.Event()
    refused = Grammar("regex", "(?=a)b")
    fresh.start(SCHEMA).result()
    with pytest.raises(ValueError):
        fresh.start(refused).result()
    monkeypatch.setattr("actors.grammars.compiler._source", lambda grammar: goes_on.wait(60) and source(grammar))
    slow = fresh.start(Grammar("regex", "a"))
    assert fresh.start(SCHEMA).done() and fresh.start(refused).done() and not slow.done()
    goes_on.set()
    slow.result()


@pytest.mark.parametrize(
    ("grammar", "line"),
    [
        (Grammar("regex", r"[^\s\S]"), "no text follows it"),
        (Grammar("json_schema", '{"$ref": "#"}'), "no text follows it"),
        (Grammar("lark", "start: start"), "no text follows it"),
        (Grammar("regex", "a{1000000}"), "lexer error: too many expressions .*"),
    ],
    ids=str,
)
def test_a_grammar_that_nothing_can_begin_is_refused(compiler, grammar, line):
    """Its request would end with an error at its first token, after passes have waited for it."""
    with pytest.raises(ValueError, match=rf"^grammar: this {grammar.kind} cannot be used \({line}\)$"):
        compiler.matcher(grammar)


PATTERNS = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(18)]
MULTIPLES = [{"type": "integer", "multipleOf": step} for step in (9973, 9967)]


@pytest.mark.extended
@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", json.dumps({"allOf": PATTERNS})),
        pytest.param(Grammar("json_schema", json.dumps({"allOf": MULTIPLES})), marks=pytest.mark.slow),
        pytest.param(
            Grammar("lark", f"start: %json {json.dumps({'allOf': MULTIPLES}).replace('m', chr(92) + 'u006d')}"),
            marks=pytest.mark.slow,
        ),
        Grammar("lark", "start: A\nA: " + " & ".join(f"/(.*a.{{{i}}}b.*)/" for i in range(20))),
    ],
)
def test_a_grammar_that_takes_too_long_to_compile_is_refused(compiler, grammar):
    """Tried in a process of its own: here some of them would take all memory."""
    with pytest.raises(ValueError, match=rf"^grammar: is no {grammar.kind} \(takes too long to compile; use .*\)$"):
        compiler.start(grammar).result()


def test_a_token_that_the_tokenizer_does_not_have_is_rejected_as_any_other(compiler, allowed_after):
    letters = Grammar("regex", "[a-z]*")
    masks = GrammarMasks(compiler)
    for token in (VOCAB_SIZE - 1, 1 << 20):
        masks.open(7, letters)
        found = masks.masked([Text([5, 6], TokenTree.chain(6, [token, 70]))], torch.zeros(3, VOCAB_SIZE))
        assert set(found[0].isfinite().nonzero().flatten().tolist()) == allowed_after(letters, [])


class NeverReady(Future):
    def result(self, timeout=None):
        self.waited_s = timeout
        time.sleep(1.5 * timeout)
        return super().result(0)


class Slow:
    """A compiler that is never ready."""

    def __init__(self):
        self.futures = []

    def start(self, grammar):
        self.futures.append(NeverReady())
        return self.futures[-1]


def test_passes_wait_for_the_grammars_of_each_client_so_long_and_no_longer(monkeypatch):
    monkeypatch.setattr("actors.grammars.masks._READY_S", 0.2)
    slow = Slow()
    masks = GrammarMasks(slow)
    for request_id, scope in enumerate((1, 1, 1, 2)):
        masks.open(request_id, Grammar("regex", "a"), scope)
        found = masks.masked([Text([5, 6], TokenTree.root(6), request_id)], torch.zeros(1, VOCAB_SIZE))
        assert not found.isfinite().any()
    masks.clear()
    assert [future.waited_s for future in slow.futures] == [0.2, 0.0, 0.0, 0.2]
    assert all(future.cancelled() for future in slow.futures), "what no request waits for is not compiled"


@pytest.mark.extended
def test_a_grammar_that_is_too_ambiguous_ends_its_text(compiler):
    """Its steps are bounded: with the library's own limits each takes seconds."""
    rules = [f'r{i}: "a" r{(7 * i + 1) % 1500} | "a"' for i in range(1500)]
    ambiguous = Grammar("lark", f"start: {' | '.join(f'r{i}' for i in range(1500))}\n" + "\n".join(rules))
    masks = GrammarMasks(compiler)
    masks.open(7, ambiguous)
    letter = compiler.matcher(Grammar("regex", "a")).compute_ff_tokens()[0]
    found = masks.masked([Text([5, 6], TokenTree.chain(6, [letter] * 4))], torch.zeros(5, VOCAB_SIZE))
    assert not found.isfinite().any()
    small = Grammar("json_schema", '{"type": "integer", "multipleOf": 7, "minimum": 0}')
    assert compiler.matcher(small).compute_bitmask()
