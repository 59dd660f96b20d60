"""`python -m services.serving`: one replica of one base model."""

from __future__ import annotations

from services.serving.app import build
from services.serving.config import ServingSettings
from shared.service import run_service

if __name__ == "__main__":
    run_service("serving", ServingSettings(), build)
