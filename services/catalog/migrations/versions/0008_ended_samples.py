"""The order in which the samples of a sampler ended, and the clients that joined it"""

from alembic import op
import sqlalchemy as sa


revision = '0008'
down_revision = '0007'


def upgrade() -> None:
    with op.batch_alter_table('samplers', schema=None) as batch_op:
        batch_op.add_column(sa.Column('ended', sa.BigInteger(), nullable=False, server_default='0'))
        batch_op.add_column(sa.Column('clients', sa.Integer(), nullable=False, server_default='0'))

    with op.batch_alter_table('operations', schema=None) as batch_op:
        batch_op.add_column(sa.Column('ended', sa.BigInteger(), nullable=True))
        batch_op.create_index('ix_operations_sampler_ended', ['sampler_id', 'ended'], unique=False)
