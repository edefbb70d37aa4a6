"""What things cost on this machine, measured side by side.

To add a benchmark: its settings to `config.BENCHMARKS`, and a module of the same name with its columns and a `run`.
"""
