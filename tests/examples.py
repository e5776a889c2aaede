"""How many examples a property test draws that takes a second or more."""

from __future__ import annotations

from hypothesis import settings


def examples(most: int, share: int = 6) -> int:
    """All under `HYPOTHESIS_PROFILE=explore`; one in `share` in the default run, whose examples are always the same."""
    return most if settings.get_current_profile_name() == "explore" else most // share
