"""Records survive the wire, and nothing else passes for one: not bytes, not values of another type, not part of one."""

from __future__ import annotations

import contextlib
from dataclasses import fields, is_dataclass
from typing import get_args, get_origin, get_type_hints

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.transport.channel import CODEC
from actors.transport.codec import CodecError
from tests.first_use import use_together

JSON = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=5)
VALUES = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=9),
    bytes: st.binary(max_size=9),
    bool: st.booleans(),
    object: JSON,
}


def values_of(annotation, basic=VALUES):
    """A strategy of values of this annotation, which are made of the `basic` ones."""
    arguments = get_args(annotation)
    if is_dataclass(annotation):
        hints = get_type_hints(annotation)
        return st.builds(
            annotation, **{field.name: values_of(hints[field.name], basic) for field in fields(annotation)}
        )
    if get_origin(annotation) is tuple and arguments[-1] is Ellipsis:
        return st.lists(values_of(arguments[0], basic), max_size=3).map(tuple)
    if get_origin(annotation) is tuple:
        return st.tuples(*(values_of(argument, basic) for argument in arguments))
    if get_origin(annotation) is dict:
        return st.dictionaries(st.text(max_size=5), JSON, max_size=3)
    if arguments:
        return st.one_of([st.none() if inner is type(None) else values_of(inner, basic) for inner in arguments])
    return basic.get(annotation, VALUES.get(annotation, JSON))


RECORDS = [values_of(record_type) for record_type in CODEC.record_types]


@pytest.mark.parametrize("records", RECORDS, ids=lambda records: str(records)[:30])
def test_a_record_survives_the_wire_and_a_part_of_it_is_refused(records):
    @settings(max_examples=8, deadline=None)
    @given(records, st.data())
    def survives(record, data):
        payload = CODEC.encode(record)
        decoded = CODEC.decode(payload)
        assert decoded == record and type(decoded) is type(record)
        with pytest.raises(CodecError):
            CODEC.decode(payload[: data.draw(st.integers(0, len(payload) - 1))])

    survives()


WRONG = [None, True, 1.5, "x", b"x", {}, {"a": 1}, [1], [[]], -1]
"""Values as msgpack has them; whichever of them a field may hold is none of its wrong ones."""


@pytest.mark.extended
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CODEC.record_types), st.data())
def test_no_value_of_another_type_is_taken(record_type, data):
    """That holds for any field of any record: a boolean or a fraction is no integer, an object is no number."""
    hints = get_type_hints(record_type)
    record = msgspec.to_builtins(data.draw(values_of(record_type)))
    for name in [name for name in hints if get_origin(hints[name]) is not dict]:
        for value in WRONG:
            payload = CODEC._tags[record_type] + msgpack.packb(record | {name: value})
            with contextlib.suppress(CodecError):
                taken = getattr(CODEC.decode(payload), name)
                assert fits(taken, hints[name]), f"{name}={value!r}"


def fits(value, annotation):
    """Whether this is a value of this annotation, by its exact type."""
    arguments = get_args(annotation)
    if get_origin(annotation) is tuple:
        inner = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return type(value) is tuple and all(map(fits, value, inner))
    return any(fits(value, one) for one in arguments) if arguments else type(value) is annotation


@pytest.mark.extended
@given(st.binary(max_size=60) | st.integers(0, 20).flatmap(lambda tag: st.binary().map(lambda b: bytes([tag]) + b)))
@settings(max_examples=300, deadline=None)
def test_garbage_raises_nothing_but_codec_errors(payload):
    with contextlib.suppress(CodecError):
        CODEC.decode(payload)


def test_deep_nesting_is_refused():
    ready = next(tag for record_type, tag in CODEC._tags.items() if record_type.__name__ == "Ready")
    nested = b"\x84\xa4role\xa1x\xa4rank\x00\xa5epoch\x00\xa5facts\x81\xa1x" + b"\x91" * 100_000 + b"\x00"
    with pytest.raises(CodecError):
        CODEC.decode(ready + nested)


@pytest.mark.parametrize("header", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
def test_a_size_that_the_bytes_do_not_have_is_refused(header):
    """Four thousand million elements, announced in five bytes."""
    ready = next(tag for record_type, tag in CODEC._tags.items() if record_type.__name__ == "Ready")
    with pytest.raises(CodecError):
        CODEC.decode(ready + b"\x84\xa4role\xa1x\xa4rank\x00\xa5epoch\x00\xa5facts\x81\xa1x" + header)


@pytest.mark.parametrize("tag", [len(CODEC.record_types), 255])
def test_a_tag_of_no_record_is_refused(tag):
    with pytest.raises(CodecError):
        CODEC.decode(bytes([tag]) + b"\x80")


def test_floats_keep_all_their_bits():
    from actors.protocol.messages import SparseDistribution, VerdictBatch

    weight = 0.1 + 2**-50
    assert CODEC.decode(CODEC.encode(VerdictBatch(1, (), weight, 0.0))).started == weight
    assert SparseDistribution((1,), (weight,)).probs == (weight,)


@pytest.mark.extended
def test_threads_may_use_a_record_for_the_first_time_together():
    """As the ranks of one process do."""
    before = "codec = Codec((outer,)); payload = codec.encode(outer((inner(), inner()), inner(3)))"
    use_together("from actors.transport.codec import Codec", before, "codec.decode(payload)")
