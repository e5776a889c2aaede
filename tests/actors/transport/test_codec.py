from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.transport.codec import Codec, CodecError


@dataclass(frozen=True)
class Leaf:
    numbers: tuple[int, ...]
    weight: float | None


@dataclass(frozen=True)
class Branch:
    leaves: tuple[Leaf | None, ...]
    only: Leaf | None
    name: str
    facts: dict[str, object]


@dataclass(frozen=True)
class Empty:
    pass


int64 = st.integers(-(2**63), 2**64 - 1)
leaves = st.builds(Leaf, st.lists(int64).map(tuple), st.none() | st.floats(allow_nan=False))
branches = st.builds(
    Branch,
    st.lists(st.none() | leaves).map(tuple),
    st.none() | leaves,
    st.text(),
    st.dictionaries(st.text(), st.integers(0, 9) | st.text() | st.binary()),
)
codec = Codec((Empty, Leaf, Branch))


@given(leaves | branches | st.just(Empty()))
def test_a_record_survives_the_wire(record):
    decoded = codec.decode(codec.encode(record))
    assert decoded == record and type(decoded) is type(record)


@given(branches, st.data())
def test_a_cut_record_is_refused(record, data):
    payload = codec.encode(record)
    with pytest.raises(CodecError):
        codec.decode(payload[: data.draw(st.integers(0, len(payload) - 1))])


@given(st.binary(max_size=40))
def test_garbage_raises_nothing_but_codec_errors(payload):
    with contextlib.suppress(CodecError):
        codec.decode(payload)


def test_a_tag_nobody_knows_is_refused():
    with pytest.raises(CodecError):
        codec.decode(Codec((Leaf, Branch, Leaf, Empty)).encode(Empty()))


def test_floats_keep_all_their_bits():
    weight = 0.1 + 2**-50
    assert codec.decode(codec.encode(Leaf((), weight))).weight == weight
