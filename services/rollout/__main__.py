"""`python -m services.rollout`"""

from __future__ import annotations

from services.rollout.app import build
from services.rollout.config import RolloutSettings
from shared.service import run_service

if __name__ == "__main__":
    run_service("rollout", RolloutSettings(), build)
