"""`python -m shared.bus.provision`: brings the bus of MINT_NATS_URL to the table, for the bases of
MINT_BASES_FILE. Exit code 1 and the reason on stderr when it cannot."""

from __future__ import annotations

import asyncio
import json
import sys

import nats

from shared.errors import MintError
from shared.settings import CommonSettings

from .provisioner import provision
from .table import table_for

__all__ = ["main"]


async def _provision(settings: CommonSettings) -> None:
    tokens = [base["token"] for base in json.loads(settings.bases_file.read_text())["bases"]]
    client = await nats.connect(settings.nats_url, max_reconnect_attempts=3, reconnect_time_wait=0.5)
    try:
        await provision(client.jetstream(timeout=10), table_for(tokens, settings.ack_wait_s))
    finally:
        await client.close()


def main() -> int:
    settings = CommonSettings()
    try:
        asyncio.run(_provision(settings))
    except (MintError, OSError, KeyError, ValueError, nats.errors.Error) as error:
        sys.stderr.write(f"cannot provision the bus at {settings.nats_url}: {type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
