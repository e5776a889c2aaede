"""Threads that use types of records for the first time together, many times over, in a process of their own: it ends by
a signal where they must not."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys, threading
from dataclasses import make_dataclass
{imports}

sys.setswitchinterval(1e-6)
fields = [(f"field_{{i}}", "int | None", None) for i in range(12)]
for number in range(100):
    inner = make_dataclass(f"Inner{{number}}", fields, frozen=True)
    outer = make_dataclass(f"Outer{{number}}", [("several", tuple[inner, ...]), ("one", inner)], frozen=True)
    {before}
    gate = threading.Barrier(4)

    def read() -> None:
        gate.wait()
        assert {value}.one.field_0 == 3

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def use_together(imports: str, before: str, value: str) -> None:
    """`value` is an expression that reads an `outer` whose `one.field_0` is 3; `before` is a statement that runs
    once."""
    program = _PROGRAM.format(imports=imports, before=before, value=value)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
