"""The version of Baton, read by the build and reported by every service."""

import re

__version__ = "0.1.0"


def works_with(theirs: str, ours: str = __version__) -> bool:
    """Whether a service of another version can be spoken with: of the same minor release, or the one before or after.

    Args:
        theirs: Its version; empty: it does not say.
        ours: This one's.
    """
    if not theirs:
        return True
    parts = [re.match(r"(\d+)\.(\d+)", version) for version in (theirs, ours)]
    numbers = [(int(part[1]), int(part[2])) for part in parts if part is not None]
    if len(numbers) < 2:
        return False
    (major, minor), (own_major, own_minor) = numbers
    return major == own_major and abs(minor - own_minor) <= 1
