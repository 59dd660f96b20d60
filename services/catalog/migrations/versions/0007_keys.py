"""API keys, by their sha256"""

from alembic import op
import sqlalchemy as sa


revision = '0007'
down_revision = '0006'


def upgrade() -> None:
    op.create_table('keys',
    sa.Column('seq', sa.Integer(), autoincrement=True, nullable=False),
    sa.Column('key_id', sa.String(length=16), nullable=False),
    sa.Column('sha256', sa.String(length=64), nullable=False),
    sa.Column('tenant', sa.String(length=63), nullable=False),
    sa.Column('label', sa.Text(), nullable=False),
    sa.Column('kind', sa.String(length=8), nullable=False),
    sa.Column('created_at', sa.Float(precision=53), nullable=False),
    sa.Column('created_by', sa.Text(), nullable=False),
    sa.Column('revoked_at', sa.Float(precision=53), nullable=True),
    sa.Column('revoked_by', sa.Text(), nullable=True),
    sa.PrimaryKeyConstraint('seq', name=op.f('pk_keys')),
    sa.UniqueConstraint('key_id', name=op.f('uq_keys_key_id')),
    sa.UniqueConstraint('sha256', name=op.f('uq_keys_sha256'))
    )
    with op.batch_alter_table('keys', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_keys_tenant'), ['tenant'], unique=False)
