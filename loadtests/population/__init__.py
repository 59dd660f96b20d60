"""What serving a population of policies costs, measured from outside: one module per part."""
