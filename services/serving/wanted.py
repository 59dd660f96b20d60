"""What the catalog wants resident here, as far as it fits.

In flow desired residency and the sizes of adapters as they become known; out flow what to load and what
to pin, most urgent first. Invariants: what is to be kept fits into the memory tier by count, and by bytes once
its sizes are known; one place at least stays unpinned, so that a cold load always finds room; and runs, however
many revisions they need, leave one place to the first alias move.
"""

from __future__ import annotations

from shared.adapters.manifest import Manifest
from shared.residency import Desired, DesiredRevision

MOVING = 1
"""The priority of what an alias move waits for; runs are more urgent."""


class Wanted:
    """`capacity` in revisions."""

    def __init__(self, capacity: int, max_bytes: int) -> None:
        self._capacity, self._max_bytes = capacity, max_bytes
        self._digests: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._moving: str | None = None
        self.pinned: tuple[str, ...] = ()
        self.if_there_is_room: tuple[str, ...] = ()

    def take(self, desired: Desired) -> None:
        # What does not fit is not pinned either: it would hold the place of something more urgent.
        ordered = self._within(sorted(desired.entries, key=lambda entry: entry.priority))
        self._moving = next((entry.revision for entry in ordered if _moves(entry)), None)
        self._digests = {entry.revision: entry.adapter_sha256 for entry in ordered}
        self.if_there_is_room = tuple(entry.revision for entry in ordered if not entry.keep)
        self._sizes = {revision: size for revision, size in self._sizes.items() if revision in self._digests}
        self.pinned = tuple([entry.revision for entry in ordered if entry.pinned][: max(self._capacity - 1, 0)])

    def learn(self, manifest: Manifest) -> None:
        """How large a revision is."""
        if manifest.revision in self._digests:
            self._sizes[manifest.revision] = manifest.adapter_bytes

    def size(self, revision: str) -> int:
        """In bytes; 0 = not known yet."""
        return self._sizes.get(revision, 0)

    def largest(self) -> int:
        return max(self._sizes.values(), default=0)

    def digest(self, revision: str) -> str | None:
        """The adapter that is wanted under that name."""
        return self._digests.get(revision)

    def revisions(self) -> list[str]:
        """What is to be kept, most urgent first."""
        left, found = self._max_bytes, list[str]()
        for revision in self._digests:
            if revision in self.if_there_is_room:
                continue
            if self.size(revision) > left:
                break
            left -= self.size(revision)
            found.append(revision)
        return self._with_a_move(found, left)

    def _within(self, ordered: list[DesiredRevision]) -> list[DesiredRevision]:
        """As many as there are places; the last one is the first move's where runs need them all."""
        kept, rest = ordered[: self._capacity], ordered[self._capacity :]
        moving = next((entry for entry in rest if _moves(entry)), None)
        if moving is not None and len(kept) > 1 and not any(_moves(entry) for entry in kept):
            kept[-1] = moving
        return kept

    def _with_a_move(self, found: list[str], left: int) -> list[str]:
        """`found`, and the first move also where the bytes of what is more urgent left none for it."""
        moving = self._moving
        if moving is None or moving in found or self.size(moving) > self._max_bytes:
            return found
        while len(found) > 1 and self.size(moving) > left:
            left += self.size(found.pop())
        return [*found, moving] if self.size(moving) <= left else found


def _moves(entry: DesiredRevision) -> bool:
    return entry.keep and entry.priority == MOVING
