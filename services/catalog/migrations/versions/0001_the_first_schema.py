"""The first schema"""

from alembic import op
import sqlalchemy as sa


revision = '0001'
down_revision = None


def upgrade() -> None:
    op.create_table('alias_moves',
    sa.Column('seq', sa.Integer(), autoincrement=True, nullable=False),
    sa.Column('policy', sa.String(length=127), nullable=False),
    sa.Column('alias', sa.String(length=63), nullable=False),
    sa.Column('version', sa.Integer(), nullable=False),
    sa.Column('revision', sa.Text(), nullable=False),
    sa.Column('previous', sa.Text(), nullable=True),
    sa.Column('reason', sa.Text(), nullable=False),
    sa.Column('actor', sa.Text(), nullable=False),
    sa.Column('run_id', sa.Text(), nullable=True),
    sa.Column('at', sa.Float(precision=53), nullable=False),
    sa.PrimaryKeyConstraint('seq', name=op.f('pk_alias_moves')),
    sa.UniqueConstraint('policy', 'alias', 'version', name=op.f('uq_alias_moves_policy'))
    )
    op.create_table('data',
    sa.Column('tenant', sa.String(length=63), nullable=False),
    sa.Column('sha256', sa.String(length=64), nullable=False),
    sa.Column('key', sa.Text(), nullable=False),
    sa.Column('size', sa.BigInteger(), nullable=False),
    sa.Column('created_at', sa.Float(precision=53), nullable=False),
    sa.PrimaryKeyConstraint('tenant', 'sha256', name=op.f('pk_data'))
    )
    op.create_table('files',
    sa.Column('key', sa.String(length=512), nullable=False),
    sa.Column('sha256', sa.Text(), nullable=False),
    sa.Column('size', sa.BigInteger(), nullable=False),
    sa.Column('owner', sa.Text(), nullable=False),
    sa.PrimaryKeyConstraint('key', name=op.f('pk_files'))
    )
    op.create_table('leases',
    sa.Column('resource', sa.String(length=200), nullable=False),
    sa.Column('epoch', sa.Integer(), nullable=False),
    sa.Column('command_id', sa.Text(), nullable=False),
    sa.Column('worker', sa.Text(), nullable=False),
    sa.Column('expires_at', sa.Float(precision=53), nullable=False),
    sa.PrimaryKeyConstraint('resource', name=op.f('pk_leases'))
    )
    op.create_table('outbox',
    sa.Column('seq', sa.Integer(), autoincrement=True, nullable=False),
    sa.Column('type', sa.Text(), nullable=False),
    sa.Column('ce_id', sa.Text(), nullable=False),
    sa.Column('token', sa.Text(), nullable=False),
    sa.Column('subject', sa.Text(), nullable=True),
    sa.Column('body', sa.JSON(), nullable=False),
    sa.Column('traceparent', sa.Text(), nullable=True),
    sa.Column('replay', sa.Integer(), nullable=True),
    sa.Column('created_at', sa.Float(precision=53), nullable=False),
    sa.Column('published_at', sa.Float(precision=53), nullable=True),
    sa.PrimaryKeyConstraint('seq', name=op.f('pk_outbox'))
    )
    with op.batch_alter_table('outbox', schema=None) as batch_op:
        batch_op.create_index('ix_outbox_unpublished', ['published_at', 'seq'], unique=False)

    op.create_table('policies',
    sa.Column('policy', sa.String(length=127), nullable=False),
    sa.Column('tenant', sa.String(length=63), nullable=False),
    sa.Column('base', sa.Text(), nullable=False),
    sa.Column('created_at', sa.Float(precision=53), nullable=False),
    sa.Column('last_number', sa.Integer(), nullable=False),
    sa.PrimaryKeyConstraint('policy', name=op.f('pk_policies'))
    )
    with op.batch_alter_table('policies', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_policies_tenant'), ['tenant'], unique=False)

    op.create_table('prewarms',
    sa.Column('revision', sa.String(length=140), nullable=False),
    sa.Column('until', sa.Float(precision=53), nullable=False),
    sa.PrimaryKeyConstraint('revision', name=op.f('pk_prewarms'))
    )
    op.create_table('runs',
    sa.Column('seq', sa.Integer(), autoincrement=True, nullable=False),
    sa.Column('run_id', sa.String(length=36), nullable=False),
    sa.Column('policy', sa.String(length=127), nullable=True),
    sa.Column('tenant', sa.String(length=63), nullable=True),
    sa.Column('active_policy', sa.String(length=127), nullable=True),
    sa.Column('base', sa.Text(), nullable=True),
    sa.Column('token', sa.Text(), nullable=False),
    sa.Column('state', sa.String(length=16), nullable=False),
    sa.Column('method', sa.Text(), nullable=True),
    sa.Column('steps', sa.Integer(), nullable=False),
    sa.Column('outcome', sa.Text(), nullable=False),
    sa.Column('request', sa.JSON(), nullable=False),
    sa.Column('request_source', sa.Text(), nullable=False),
    sa.Column('request_id', sa.Text(), nullable=False),
    sa.Column('traceparent', sa.Text(), nullable=False),
    sa.Column('created_at', sa.Float(precision=53), nullable=False),
    sa.Column('started_at', sa.Float(precision=53), nullable=True),
    sa.Column('ended_at', sa.Float(precision=53), nullable=True),
    sa.Column('waiting_since', sa.Float(precision=53), nullable=True),
    sa.Column('waiting_for', sa.Text(), nullable=True),
    sa.Column('parent', sa.Text(), nullable=True),
    sa.Column('alias_version', sa.Integer(), nullable=True),
    sa.Column('lora', sa.JSON(), nullable=True),
    sa.Column('task_sha256', sa.Text(), nullable=True),
    sa.Column('scorer', sa.Text(), nullable=True),
    sa.Column('promoted', sa.Boolean(), nullable=False),
    sa.PrimaryKeyConstraint('seq', name=op.f('pk_runs')),
    sa.UniqueConstraint('active_policy', name=op.f('uq_runs_active_policy')),
    sa.UniqueConstraint('run_id', name=op.f('uq_runs_run_id'))
    )
    with op.batch_alter_table('runs', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_runs_policy'), ['policy'], unique=False)
        batch_op.create_index(batch_op.f('ix_runs_state'), ['state'], unique=False)
        batch_op.create_index(batch_op.f('ix_runs_tenant'), ['tenant'], unique=False)

    op.create_table('checkpoints',
    sa.Column('run_id', sa.String(length=36), nullable=False),
    sa.Column('step', sa.Integer(), nullable=False),
    sa.Column('policy', sa.String(length=127), nullable=False),
    sa.Column('files', sa.JSON(), nullable=False),
    sa.Column('has_optimizer', sa.Boolean(), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.run_id'], name=op.f('fk_checkpoints_run_id')),
    sa.PrimaryKeyConstraint('run_id', 'step', name=op.f('pk_checkpoints'))
    )
    with op.batch_alter_table('checkpoints', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_checkpoints_policy'), ['policy'], unique=False)

    op.create_table('commands',
    sa.Column('command_id', sa.String(length=200), nullable=False),
    sa.Column('run_id', sa.String(length=36), nullable=False),
    sa.Column('kind', sa.String(length=16), nullable=False),
    sa.Column('step', sa.Integer(), nullable=False),
    sa.Column('token', sa.Text(), nullable=False),
    sa.Column('resource', sa.Text(), nullable=False),
    sa.Column('state', sa.String(length=16), nullable=False),
    sa.Column('body', sa.JSON(), nullable=False),
    sa.Column('takes', sa.Integer(), nullable=False),
    sa.Column('issues', sa.Integer(), nullable=False),
    sa.Column('issued_at', sa.Float(precision=53), nullable=False),
    sa.Column('deadline_at', sa.Float(precision=53), nullable=False),
    sa.Column('failure', sa.Text(), nullable=False),
    sa.Column('result', sa.JSON(), nullable=True),
    sa.Column('event', sa.JSON(), nullable=True),
    sa.Column('committed_at', sa.Float(precision=53), nullable=True),
    sa.ForeignKeyConstraint(['run_id'], ['runs.run_id'], name=op.f('fk_commands_run_id')),
    sa.PrimaryKeyConstraint('command_id', name=op.f('pk_commands'))
    )
    with op.batch_alter_table('commands', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_commands_run_id'), ['run_id'], unique=False)

    op.create_table('evaluations',
    sa.Column('seq', sa.Integer(), autoincrement=True, nullable=False),
    sa.Column('score_key', sa.String(length=64), nullable=False),
    sa.Column('command_id', sa.String(length=200), nullable=False),
    sa.Column('run_id', sa.String(length=36), nullable=False),
    sa.Column('policy', sa.Text(), nullable=False),
    sa.Column('base', sa.Text(), nullable=False),
    sa.Column('revision', sa.String(length=140), nullable=True),
    sa.Column('adapter_sha256', sa.Text(), nullable=True),
    sa.Column('task_sha256', sa.Text(), nullable=False),
    sa.Column('scorer', sa.Text(), nullable=False),
    sa.Column('sampling', sa.JSON(), nullable=False),
    sa.Column('items', sa.Integer(), nullable=False),
    sa.Column('score', sa.Float(precision=53), nullable=False),
    sa.Column('details', sa.JSON(), nullable=False),
    sa.Column('created_at', sa.Float(precision=53), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.run_id'], name=op.f('fk_evaluations_run_id')),
    sa.PrimaryKeyConstraint('seq', name=op.f('pk_evaluations')),
    sa.UniqueConstraint('command_id', name=op.f('uq_evaluations_command_id')),
    sa.UniqueConstraint('score_key', name=op.f('uq_evaluations_score_key'))
    )
    with op.batch_alter_table('evaluations', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_evaluations_revision'), ['revision'], unique=False)
        batch_op.create_index(batch_op.f('ix_evaluations_run_id'), ['run_id'], unique=False)

    op.create_table('journal',
    sa.Column('seq', sa.Integer(), autoincrement=True, nullable=False),
    sa.Column('run_id', sa.String(length=36), nullable=False),
    sa.Column('fact', sa.Text(), nullable=False),
    sa.Column('type', sa.Text(), nullable=False),
    sa.Column('body', sa.JSON(), nullable=False),
    sa.Column('at', sa.Float(precision=53), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.run_id'], name=op.f('fk_journal_run_id')),
    sa.PrimaryKeyConstraint('seq', name=op.f('pk_journal')),
    sa.UniqueConstraint('run_id', 'fact', name=op.f('uq_journal_run_id'))
    )
    with op.batch_alter_table('journal', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_journal_run_id'), ['run_id'], unique=False)

    op.create_table('revisions',
    sa.Column('seq', sa.Integer(), autoincrement=True, nullable=False),
    sa.Column('revision', sa.String(length=140), nullable=False),
    sa.Column('policy', sa.String(length=127), nullable=False),
    sa.Column('number', sa.Integer(), nullable=False),
    sa.Column('base', sa.Text(), nullable=False),
    sa.Column('run_id', sa.String(length=36), nullable=False),
    sa.Column('step', sa.Integer(), nullable=False),
    sa.Column('export_command', sa.String(length=200), nullable=False),
    sa.Column('parent', sa.Text(), nullable=True),
    sa.Column('adapter_sha256', sa.Text(), nullable=False),
    sa.Column('adapter_bytes', sa.BigInteger(), nullable=False),
    sa.Column('zero_delta', sa.Boolean(), nullable=False),
    sa.Column('manifest', sa.JSON(), nullable=False),
    sa.Column('created_at', sa.Float(precision=53), nullable=False),
    sa.ForeignKeyConstraint(['policy'], ['policies.policy'], name=op.f('fk_revisions_policy')),
    sa.ForeignKeyConstraint(['run_id'], ['runs.run_id'], name=op.f('fk_revisions_run_id')),
    sa.PrimaryKeyConstraint('seq', name=op.f('pk_revisions')),
    sa.UniqueConstraint('export_command', name=op.f('uq_revisions_export_command')),
    sa.UniqueConstraint('policy', 'number', name=op.f('uq_revisions_policy')),
    sa.UniqueConstraint('revision', name=op.f('uq_revisions_revision')),
    sa.UniqueConstraint('run_id', 'step', name=op.f('uq_revisions_run_id'))
    )
    op.create_table('aliases',
    sa.Column('policy', sa.String(length=127), nullable=False),
    sa.Column('alias', sa.String(length=63), nullable=False),
    sa.Column('revision', sa.String(length=140), nullable=False),
    sa.Column('previous', sa.Text(), nullable=True),
    sa.Column('version', sa.Integer(), nullable=False),
    sa.ForeignKeyConstraint(['policy'], ['policies.policy'], name=op.f('fk_aliases_policy')),
    sa.ForeignKeyConstraint(['revision'], ['revisions.revision'], name=op.f('fk_aliases_revision')),
    sa.PrimaryKeyConstraint('policy', 'alias', name=op.f('pk_aliases'))
    )
    # ### end Alembic commands ###
