"""Pinned policies: those whose aliases stay resident"""

import sqlalchemy as sa
from alembic import op


revision = '0004'
down_revision = '0003'


def upgrade() -> None:
    op.add_column('policies', sa.Column('pinned', sa.Boolean(), nullable=False, server_default=sa.false()))
    op.create_index('ix_policies_pinned', 'policies', ['policy'], sqlite_where=sa.text('pinned'), postgresql_where=sa.text('pinned'))
