"""The openai client's surface on the tiny base and the Transformers engine, through a whole stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.e2e.openai_checks import CHECKS
from tests.e2e.openai_surface import Surface, trained_surface
from tests.stacks import StackProcess
from tests.tiny import TINY_NAME


@pytest.fixture(scope="module")
def surface(shared_stack: StackProcess) -> Iterator[Surface]:
    with trained_surface(shared_stack, TINY_NAME) as found:
        yield found


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_clients_surface(surface: Surface, check: Callable[[Surface], None]) -> None:
    check(surface)
