"""The picked revision: a run may stand for another revision than its last"""

from alembic import op
import sqlalchemy as sa


revision = '0002'
down_revision = '0001'


def upgrade() -> None:
    with op.batch_alter_table('runs', schema=None) as batch_op:
        batch_op.add_column(sa.Column('picked', sa.Text(), nullable=True))
