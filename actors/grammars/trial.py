"""Whether a grammar can be compiled, tried in a process of its own with little time and memory.

Run as a program it compiles the grammar that it reads, and is ended by the system where that takes too much. Some
have intersections of regular expressions whose states llguidance counts without any limit: 600 characters of `allOf`
and `pattern` took 13 s and 0.7 GB, and each alternative more doubles both. Imports nothing of this project.
"""

from __future__ import annotations

import subprocess
import sys

CPU_S = 1
"""Seconds of processor time, start included; a schema of 64 KB with 900 patterns takes 0.1 s."""
_MEMORY = 1 << 30
"""Bytes of address space, of which the interpreter takes a tenth."""
_WALL_S = 5.0
"""A loaded machine gives the processor time later."""
_INTERSECTING = ("pattern", "format", "multipleOf", "\\u", "&", "~")
"""Words of schemas that may be slow, an escape, in which they could be written, and Lark's operators."""


def needs_trial(text: str) -> bool:
    """Whether the limits of the library may not bound the compilation of this text."""
    return any(word in text for word in _INTERSECTING)


def is_compiled_in_time(source: str) -> bool:
    """Whether this grammar, as the library has it, is compiled or found to be none within the limits. Raises
    TimeoutError where the machine had no time to find out."""
    program = [sys.executable, "-P", __file__]
    try:
        tried = subprocess.run(program, input=source.encode(), capture_output=True, timeout=_WALL_S, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    return tried.returncode == 0


def _compile() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    from llguidance import LLMatcher, LLTokenizer

    LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0)  # an error is the other process' to report


if __name__ == "__main__":
    _compile()
