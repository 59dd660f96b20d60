"""`python -m services.learner`: the base models resident, their policies trained."""

from __future__ import annotations

from services.learner.app import build
from services.learner.config import LearnerSettings
from shared.service import run_service

if __name__ == "__main__":
    run_service("learner", LearnerSettings(), build)
