"""Alembic's entry: runs the migrations on the connection and in the transaction that `migrate` opened."""

from __future__ import annotations

from alembic import context

from services.catalog.tables import Table

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Table.metadata,
    transactional_ddl=True,
    render_as_batch=True,
)
context.run_migrations()
