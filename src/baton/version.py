"""The version of Baton, read by the build and reported by every service."""

import re

__version__ = "0.1.0"


def works_with(peer: str, own: str = __version__) -> bool:
    """Whether services of two versions work together: their minor releases are the same or adjacent.

    Args:
        peer: Version of the peer; empty if the peer does not report one, which is accepted.
        own: Version of this process.
    """
    if not peer:
        return True
    parts = [re.match(r"(\d+)\.(\d+)", version) for version in (peer, own)]
    numbers = [(int(part[1]), int(part[2])) for part in parts if part is not None]
    if len(numbers) < 2:
        return False
    (major, minor), (own_major, own_minor) = numbers
    return major == own_major and abs(minor - own_minor) <= 1
