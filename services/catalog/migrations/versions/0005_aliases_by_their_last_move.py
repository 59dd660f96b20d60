"""Aliases by their last move: the ones that moved last, of one base, without reading the audit trail"""

import sqlalchemy as sa
from alembic import op


revision = '0005'
down_revision = '0004'


def upgrade() -> None:
    op.add_column('aliases', sa.Column('base', sa.Text(), nullable=False, server_default=''))
    op.add_column('aliases', sa.Column('moved', sa.Integer(), nullable=False, server_default='0'))
    op.execute(
        'UPDATE aliases SET'
        ' base = (SELECT p.base FROM policies p WHERE p.policy = aliases.policy),'
        ' moved = COALESCE((SELECT m.seq FROM alias_moves m WHERE m.policy = aliases.policy'
        ' AND m.alias = aliases.alias AND m.version = aliases.version), 0)'
    )
    op.create_index('ix_aliases_moved', 'aliases', ['base', 'moved'])
