"""The local stack: what `mint up` starts, watches and stops.

Files of one data directory: `version.json` (its format), `stack.json` (ports, pids, start times),
`stack.lock` (one change at a time), `bases.json`, `nats/`, `s3/`, `logs/<part>.log`; the services keep
theirs beside them.
"""
