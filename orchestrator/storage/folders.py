"""A folder that is made whole and then put in the place of an older one, whose foreign files are kept."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable


def exchange(draft: str, target: str, ours: Callable[[str], bool]) -> None:
    """Put the folder `draft` where `target` is, if that is there. What of the old one is not `ours`, by its name, and
    has no new one in its place is moved into the new one: only what an earlier command made is removed.

    Raises OSError. A crash leaves the old folder beside the new one, under the name of the draft.
    """
    target, old = os.path.realpath(target), f"{draft}.old"
    if os.path.lexists(target):
        os.replace(target, old)
    os.replace(draft, target)
    if not os.path.isdir(old):
        return
    for name in os.listdir(old):
        path, place = os.path.join(old, name), os.path.join(target, name)
        if ours(name):
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
        elif not os.path.lexists(place):
            os.rename(path, place)
    with contextlib.suppress(OSError):  # what is left has a new one in its place, and is not ours to remove
        os.rmdir(old)
