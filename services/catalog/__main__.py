"""`python -m services.catalog`: the catalog as a process."""

from __future__ import annotations

from services.catalog.app import build
from shared.service import run_service
from shared.settings import CommonSettings

if __name__ == "__main__":
    run_service("catalog", CommonSettings(), build)
