"""Policies by alias: a page of those that have one, without reading those that do not"""

from alembic import op


revision = '0003'
down_revision = '0002'


def upgrade() -> None:
    op.create_index('ix_aliases_alias', 'aliases', ['alias', 'policy'])
