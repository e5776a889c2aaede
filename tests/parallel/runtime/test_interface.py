"""Every runner of the project is one: it has all methods, and whatever it is built on was set up."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module

import pytest

from actors.drafters.vocabulary.translated_runner import TranslatedRunner
from parallel import speculators
from parallel.runtime.interface import Runner
from parallel.runtime.layer_parallel_runner import LayerParallelRunner
from parallel.runtime.nested_runner import NestedRunner
from parallel.runtime.runner import ModelRunner
from parallel.speculators.pard import PardRunner

for family in pkgutil.walk_packages(speculators.__path__, "parallel.speculators."):
    import_module(family.name)


def runners(base: type = Runner) -> Iterator[type]:
    """Those of the project; tests that were imported before may have some of their own."""
    for child in base.__subclasses__():
        if not child.__module__.startswith("tests."):
            yield child
        yield from runners(child)


@pytest.mark.parametrize("runner", sorted(set(runners()), key=str), ids=str)
def test_a_runner_has_every_method_and_sets_up_what_it_inherits(runner):
    if not runner.__subclasses__():
        assert not runner.__abstractmethods__, f"{runner.__name__} lacks methods of a runner"
    bases = [base for base in runner.__mro__[1:] if Runner in base.__mro__ and "__init__" in vars(base)]
    if "__init__" in vars(runner) and any(base is not Runner for base in bases):
        assert "super().__init__(" in inspect.getsource(runner.__init__)


def test_only_a_runner_of_its_own_decoder_and_pool_is_a_model_runner():
    assert set(runners(ModelRunner)) == {LayerParallelRunner, NestedRunner}
    assert {TranslatedRunner, PardRunner} <= set(runners())
