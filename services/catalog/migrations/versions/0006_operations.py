"""Sessions, models, operations, samplers, paths, and who uses which file; ephemeral revisions"""

import json

from alembic import op
import sqlalchemy as sa


revision = '0006'
down_revision = '0005'


def upgrade() -> None:
    op.create_table('file_uses',
    sa.Column('key', sa.String(length=512), nullable=False),
    sa.Column('holder', sa.String(length=250), nullable=False),
    sa.PrimaryKeyConstraint('key', 'holder', name=op.f('pk_file_uses'))
    )
    with op.batch_alter_table('file_uses', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_file_uses_holder'), ['holder'], unique=False)

    op.create_table('operations',
    sa.Column('seq', sa.Integer(), autoincrement=True, nullable=False),
    sa.Column('request_id', sa.String(length=40), nullable=False),
    sa.Column('tenant', sa.String(length=63), nullable=False),
    sa.Column('kind', sa.String(length=32), nullable=False),
    sa.Column('state', sa.String(length=16), nullable=False),
    sa.Column('model_id', sa.String(length=120), nullable=True),
    sa.Column('sampler_id', sa.String(length=120), nullable=True),
    sa.Column('seq_id', sa.BigInteger(), nullable=False),
    sa.Column('place', sa.Integer(), nullable=False),
    sa.Column('key', sa.String(length=200), nullable=True),
    sa.Column('digest', sa.String(length=64), nullable=False),
    sa.Column('payload', sa.JSON(), nullable=True),
    sa.Column('details', sa.JSON(), nullable=False),
    sa.Column('result', sa.JSON(), nullable=True),
    sa.Column('failure', sa.JSON(), nullable=True),
    sa.Column('export', sa.String(length=200), nullable=True),
    sa.Column('in_state', sa.Boolean(), nullable=False),
    sa.Column('takes', sa.Integer(), nullable=False),
    sa.Column('issues', sa.Integer(), nullable=False),
    sa.Column('accepted_at', sa.Float(precision=53), nullable=False),
    sa.Column('worked_at', sa.Float(precision=53), nullable=True),
    sa.Column('done_at', sa.Float(precision=53), nullable=True),
    sa.Column('expired', sa.Boolean(), nullable=False),
    sa.PrimaryKeyConstraint('seq', name=op.f('pk_operations')),
    sa.UniqueConstraint('model_id', 'key', name='uq_operations_model_key'),
    sa.UniqueConstraint('model_id', 'seq_id', 'place', name='uq_operations_model_place'),
    sa.UniqueConstraint('request_id', name=op.f('uq_operations_request_id')),
    sa.UniqueConstraint('sampler_id', 'seq_id', name='uq_operations_sampler_seq')
    )
    with op.batch_alter_table('operations', schema=None) as batch_op:
        batch_op.create_index('ix_operations_expired_done_at', ['expired', 'done_at'], unique=False)
        batch_op.create_index('ix_operations_in_state', ['model_id', 'in_state', 'seq_id', 'place'], unique=False)
        batch_op.create_index(
            'ix_operations_open', ['model_id', 'done_at', 'worked_at', 'seq_id', 'place'], unique=False
        )
        batch_op.create_index('ix_operations_state_kind', ['state', 'kind'], unique=False)
        batch_op.create_index('ix_operations_tenant_kind_state', ['tenant', 'kind', 'state'], unique=False)

    op.create_table('paths',
    sa.Column('seq', sa.Integer(), autoincrement=True, nullable=False),
    sa.Column('model_id', sa.String(length=120), nullable=False),
    sa.Column('kind', sa.String(length=16), nullable=False),
    sa.Column('name', sa.String(length=200), nullable=False),
    sa.Column('tenant', sa.String(length=63), nullable=False),
    sa.Column('base', sa.Text(), nullable=False),
    sa.Column('lora', sa.JSON(), nullable=False),
    sa.Column('train_unembed', sa.Boolean(), nullable=False),
    sa.Column('revision', sa.String(length=140), nullable=True),
    sa.Column('run_id', sa.String(length=36), nullable=False),
    sa.Column('step', sa.Integer(), nullable=False),
    sa.Column('files', sa.JSON(), nullable=False),
    sa.Column('has_optimizer', sa.Boolean(), nullable=False),
    sa.Column('size_bytes', sa.BigInteger(), nullable=False),
    sa.Column('created_at', sa.Float(precision=53), nullable=False),
    sa.Column('expires_at', sa.Float(precision=53), nullable=True),
    sa.Column('published', sa.Boolean(), nullable=False),
    sa.PrimaryKeyConstraint('seq', name=op.f('pk_paths')),
    sa.UniqueConstraint('model_id', 'kind', 'name', name=op.f('uq_paths_model_id'))
    )
    with op.batch_alter_table('paths', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_paths_expires_at'), ['expires_at'], unique=False)
        batch_op.create_index(batch_op.f('ix_paths_revision'), ['revision'], unique=False)
        batch_op.create_index(batch_op.f('ix_paths_tenant'), ['tenant'], unique=False)

    op.create_table('sessions',
    sa.Column('seq', sa.Integer(), autoincrement=True, nullable=False),
    sa.Column('session_id', sa.String(length=64), nullable=False),
    sa.Column('tenant', sa.String(length=63), nullable=False),
    sa.Column('state', sa.String(length=16), nullable=False),
    sa.Column('sdk_version', sa.Text(), nullable=False),
    sa.Column('tags', sa.JSON(), nullable=False),
    sa.Column('user_metadata', sa.JSON(), nullable=False),
    sa.Column('created_at', sa.Float(precision=53), nullable=False),
    sa.Column('seen_at', sa.Float(precision=53), nullable=False),
    sa.Column('ended_at', sa.Float(precision=53), nullable=True),
    sa.Column('reason', sa.Text(), nullable=False),
    sa.PrimaryKeyConstraint('seq', name=op.f('pk_sessions')),
    sa.UniqueConstraint('session_id', name=op.f('uq_sessions_session_id'))
    )
    with op.batch_alter_table('sessions', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_sessions_state'), ['state'], unique=False)
        batch_op.create_index(batch_op.f('ix_sessions_tenant'), ['tenant'], unique=False)

    op.create_table('models',
    sa.Column('seq', sa.Integer(), autoincrement=True, nullable=False),
    sa.Column('model_id', sa.String(length=120), nullable=False),
    sa.Column('session_id', sa.String(length=64), nullable=True),
    sa.Column('model_seq_id', sa.Integer(), nullable=False),
    sa.Column('tenant', sa.String(length=63), nullable=False),
    sa.Column('run_id', sa.String(length=36), nullable=False),
    sa.Column('policy', sa.String(length=127), nullable=False),
    sa.Column('base', sa.Text(), nullable=False),
    sa.Column('lora', sa.JSON(), nullable=False),
    sa.Column('seed', sa.BigInteger(), nullable=False),
    sa.Column('train_unembed', sa.Boolean(), nullable=False),
    sa.Column('user_metadata', sa.JSON(), nullable=False),
    sa.Column('state', sa.String(length=16), nullable=False),
    sa.Column('start', sa.JSON(), nullable=True),
    sa.Column('fresh_optimizer', sa.Boolean(), nullable=False),
    sa.Column('state_step', sa.Integer(), nullable=False),
    sa.Column('last_seq', sa.BigInteger(), nullable=False),
    sa.Column('next_seq', sa.BigInteger(), nullable=False),
    sa.Column('signals', sa.Integer(), nullable=False),
    sa.Column('signalled_seq', sa.BigInteger(), nullable=False),
    sa.Column('signalled_at', sa.Float(precision=53), nullable=True),
    sa.Column('failure', sa.Text(), nullable=False),
    sa.Column('created_at', sa.Float(precision=53), nullable=False),
    sa.Column('last_request_at', sa.Float(precision=53), nullable=False),
    sa.ForeignKeyConstraint(['policy'], ['policies.policy'], name=op.f('fk_models_policy')),
    sa.ForeignKeyConstraint(['run_id'], ['runs.run_id'], name=op.f('fk_models_run_id')),
    sa.ForeignKeyConstraint(['session_id'], ['sessions.session_id'], name=op.f('fk_models_session_id')),
    sa.PrimaryKeyConstraint('seq', name=op.f('pk_models')),
    sa.UniqueConstraint('model_id', name=op.f('uq_models_model_id')),
    sa.UniqueConstraint('policy', name=op.f('uq_models_policy')),
    sa.UniqueConstraint('run_id', name=op.f('uq_models_run_id'))
    )
    with op.batch_alter_table('models', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_models_session_id'), ['session_id'], unique=False)
        batch_op.create_index(batch_op.f('ix_models_state'), ['state'], unique=False)
        batch_op.create_index(batch_op.f('ix_models_tenant'), ['tenant'], unique=False)

    op.create_table('samplers',
    sa.Column('sampler_id', sa.String(length=120), nullable=False),
    sa.Column('session_id', sa.String(length=64), nullable=False),
    sa.Column('sampling_session_seq_id', sa.BigInteger(), nullable=False),
    sa.Column('tenant', sa.String(length=63), nullable=False),
    sa.Column('base', sa.Text(), nullable=False),
    sa.Column('path', sa.Text(), nullable=True),
    sa.Column('revision', sa.String(length=140), nullable=True),
    sa.Column('adapter_sha256', sa.Text(), nullable=True),
    sa.Column('digest', sa.String(length=64), nullable=False),
    sa.Column('created_at', sa.Float(precision=53), nullable=False),
    sa.ForeignKeyConstraint(['session_id'], ['sessions.session_id'], name=op.f('fk_samplers_session_id')),
    sa.PrimaryKeyConstraint('sampler_id', name=op.f('pk_samplers')),
    sa.UniqueConstraint('session_id', 'sampling_session_seq_id', name=op.f('uq_samplers_session_id'))
    )
    with op.batch_alter_table('samplers', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_samplers_revision'), ['revision'], unique=False)

    # Not as a batch, which would make the table anew and drop the old one, which aliases refer to.
    op.add_column('revisions', sa.Column('ephemeral', sa.Boolean(), nullable=False, server_default='0'))
    op.add_column('revisions', sa.Column('expires_at', sa.Float(precision=53), nullable=True))
    op.create_index(op.f('ix_revisions_expires_at'), 'revisions', ['expires_at'], unique=False)

    _uses_of_revisions()


def _uses_of_revisions() -> None:
    """Each revision uses the files of its manifest."""
    connection = op.get_bind()
    uses = sa.table('file_uses', sa.column('key', sa.String), sa.column('holder', sa.String))
    rows = connection.execute(sa.text('SELECT revision, manifest FROM revisions')).all()
    for name, manifest in rows:
        content = json.loads(manifest) if isinstance(manifest, str | bytes) else manifest
        keys = sorted({ref['key'] for ref in content.get('files', {}).values()})
        values = [{'key': key, 'holder': f'revision:{name}'} for key in keys]
        if values:
            connection.execute(uses.insert(), values)
