"""Bring a database to this build's schema, at boot.

In: an engine on a database of any age. Out: the current schema, or Fatal. Invariant: a database that a
newer build has written is left untouched.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine

from services.catalog.database import IMMEDIATE
from shared.errors import Fatal

SCRIPTS = Path(__file__).parent / "migrations"


def migrate(engine: Engine, where: str) -> None:
    """`where` names the data directory, for the message. Raises Fatal for a database of a newer build."""
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    scripts = ScriptDirectory.from_config(config)
    with engine.execution_options(**{IMMEDIATE: True}).begin() as connection:
        held = MigrationContext.configure(connection).get_current_revision()
        if held is not None and held not in {script.revision for script in scripts.walk_revisions()}:
            raise Fatal(
                f"the catalog in {where} has schema {held}, which this build does not know (it knows up to "
                f"{scripts.get_current_head()}): a newer build wrote it. Start that build, or use another data "
                "directory."
            )
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
