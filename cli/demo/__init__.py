"""The main job, from an empty data directory to a rolled-back policy, through public interfaces alone:
the `mint` command, the bus (nats-py and mint-schemas), the gateway (the openai package)."""
