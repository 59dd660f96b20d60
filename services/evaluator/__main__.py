"""`python -m services.evaluator`"""

from __future__ import annotations

from services.evaluator.app import build
from services.evaluator.config import EvaluatorSettings
from shared.service import run_service

if __name__ == "__main__":
    run_service("evaluator", EvaluatorSettings(), build)
