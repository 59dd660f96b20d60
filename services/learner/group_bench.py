"""A workbench whose turns are taken by all processes of a group together.

In: the same requests in every process, with what the leader's slots hold. Out: the same outcomes. Invariant:
after a turn the files of every step are the same bytes in every process, or none of them goes on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.learner.one_operation import OperationOutcome, OperationRequest, TurnOutcome, TurnRequest
from services.learner.one_step import reference_key, shape_of
from services.learner.peers import Group, OutOfStep
from services.learner.ranks import Held
from services.learner.slots import SlotShape
from services.learner.workbench import Workbench
from shared.errors import MintError

__all__ = ["GroupBench", "keys_of"]


class GroupBench(Workbench):
    """Like `Workbench`, of which it takes the arguments."""

    # another process may not have met the error, and would not try again
    tries_apart = False

    def __init__(self, *arguments: Any, peers: Group) -> None:
        super().__init__(*arguments)
        self._peers = peers

    def take_turn(self, requests: Sequence[TurnRequest], held: Sequence[Held]) -> list[TurnOutcome | Exception]:
        """`held` makes this process's slots say what the leader's do. Raises OutOfStep, and whatever a step
        met that is not a step's to meet: the other processes may not have met it."""
        for one in held:
            slot = self._slots.find(one.key, one.shape)
            if slot is None:
                raise OutOfStep(f"the leader has a slot of {one.key}, this process has none")
            slot.holds = one.holds
        answers = super().steps(requests)
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, MintError):
                raise answer
        self._peers.agree("what a turn computed", _digest(answers))
        return answers

    def held(self, requests: Sequence[TurnRequest]) -> list[Held]:
        """What the slots hold that `requests` will use."""
        found = [(key, shape, self._slots.find(key, shape)) for key, shape in keys_of(requests)]
        return [Held(key, shape, slot.holds) for key, shape, slot in found if slot is not None]


def keys_of(requests: Sequence[TurnRequest]) -> Iterator[tuple[str, SlotShape]]:
    """The slots of the policies, and those of their references."""
    for request in requests:
        if isinstance(request, OperationRequest):
            yield from request.slots
            continue
        shape = shape_of(request.command)
        yield request.command.policy, shape
        yield reference_key(request.command), shape


def _digest(answers: Sequence[TurnOutcome | Exception]) -> str:
    digest = hashlib.sha256()
    for answer in answers:
        files: Mapping[str, bytes] = {}
        if isinstance(answer, OperationOutcome):
            files = answer.answer.files
            digest.update(repr((answer.answer.loss, answer.answer.norm, answer.changed)).encode())
        elif not isinstance(answer, Exception):
            files = answer.files
        digest.update(f"|{len(files)} files".encode())
        for name in sorted(files):
            digest.update(name.encode() + hashlib.sha256(files[name]).digest())
    return digest.hexdigest()
