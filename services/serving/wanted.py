"""What the catalog wants resident here, as far as it fits.

In flow desired residency and the sizes of adapters as they become known; out flow what to load and what
to pin, most urgent first. Invariants: what is to be kept fits into the memory tier by count, and by bytes once
its sizes are known; one place at least stays unpinned, so that a cold load always finds room.
"""

from __future__ import annotations

from shared.adapters.manifest import Manifest
from shared.residency import Desired


class Wanted:
    """`capacity` in revisions."""

    def __init__(self, capacity: int, max_bytes: int) -> None:
        self._capacity, self._max_bytes = capacity, max_bytes
        self._digests: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self.pinned: tuple[str, ...] = ()
        self.if_there_is_room: tuple[str, ...] = ()

    def take(self, desired: Desired) -> None:
        # What does not fit is not pinned either: it would hold the place of something more urgent.
        ordered = sorted(desired.entries, key=lambda entry: entry.priority)[: self._capacity]
        self._digests = {entry.revision: entry.adapter_sha256 for entry in ordered}
        self.if_there_is_room = tuple(entry.revision for entry in ordered if not entry.keep)
        self._sizes = {revision: size for revision, size in self._sizes.items() if revision in self._digests}
        self.pinned = tuple([entry.revision for entry in ordered if entry.pinned][: max(self._capacity - 1, 0)])

    def learn(self, manifest: Manifest) -> None:
        """How large a revision is."""
        if manifest.revision in self._digests:
            self._sizes[manifest.revision] = manifest.adapter_bytes

    def digest(self, revision: str) -> str | None:
        """The adapter that is wanted under that name."""
        return self._digests.get(revision)

    def revisions(self) -> list[str]:
        """What is to be kept, most urgent first."""
        left, found = self._max_bytes, []
        for revision in self._digests:
            if revision in self.if_there_is_room:
                continue
            left -= self._sizes.get(revision, 0)
            if left < 0:
                break
            found.append(revision)
        return found
