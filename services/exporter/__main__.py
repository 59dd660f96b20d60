"""`python -m services.exporter`: training checkpoints become adapters that engines load."""

from __future__ import annotations

from services.exporter.app import build
from shared.service import run_service
from shared.settings import CommonSettings

if __name__ == "__main__":
    run_service("exporter", CommonSettings(), build)
