"""`python -m services.gateway`"""

from __future__ import annotations

from services.gateway.app import build
from services.gateway.config import GatewaySettings
from shared.service import run_service

if __name__ == "__main__":
    run_service("gateway", GatewaySettings(), build)
